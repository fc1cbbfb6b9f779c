"""Figures have one style and equal bytes, and galleries the right captions."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from gradtrail.stages.common import plotting


def everything() -> Figure:
    """A figure with all that the project draws: lines, bars, an image with its colours, text and a legend."""
    figure, axes = plotting.new_figure("A title · in two parts", columns=3, size=(9, 3))
    axes[0, 0].plot([1, 2, 3], [1, 10, 100], "o-", color=plotting.BLUE, label="‖∇ℓᵢ‖")
    axes[0, 0].set(yscale="log", xlabel="epoch")
    axes[0, 1].bar_label(axes[0, 1].bar([0, 1], [2, 1], color=plotting.GREEN), fmt="{:.1f}")
    figure.colorbar(axes[0, 2].imshow(np.eye(3), cmap="RdBu_r"), ax=axes[0, 2])
    figure.legend(loc="outside lower center")
    return figure


@pytest.mark.parametrize("channels", [(), (3,)], ids=["grayscale", "color"])
def test_a_gallery_draws_images_next_to_each_other_on_white(channels: tuple[int, ...]) -> None:
    """In color as they are; grayscale with a color map whose 0 is white."""
    images = np.random.default_rng(0).integers(1, 255, (3, 20, 30, *channels), np.uint8)
    (drawn,) = plotting.gallery(images, ["a", "b", "c"], "title", columns=2).axes[0].images
    mosaic = np.asarray(drawn.get_array())
    inside = sum(
        np.array_equal(mosaic[row : row + 20, column : column + 30], image)
        for image in images
        for row in range(len(mosaic) - 19)
        for column in range(mosaic.shape[1] - 29)
    )
    assert inside == 3
    assert np.sum(mosaic != (255 if channels else 0)) == images.size
    assert drawn.get_cmap().name == "gray_r"  # which Matplotlib ignores for colors


def test_neither_saving_again_nor_a_setting_of_matplotlib_changes_a_byte(tmp_path: Path) -> None:
    for name in ("plain", "again"):
        plotting.save(everything(), tmp_path / "new" / f"{name}.png")
    settings = {"font.size": 20, "axes.facecolor": "red", "lines.linewidth": 9, "savefig.dpi": 50, "image.cmap": "jet"}
    with mpl.rc_context(settings | {"backend": "svg"}):
        plotting.save(everything(), tmp_path / "new" / "changed.png")
    assert len({path.read_bytes() for path in (tmp_path / "new").iterdir()}) == 1
