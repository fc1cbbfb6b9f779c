"""Small classes are named; of many classes the first are drawn."""

from pathlib import Path

import numpy as np
import pytest
from factories import NUM_CLASSES, color_split, random_split
from matplotlib.figure import Figure

from gradtrail.stages.common import plotting
from gradtrail.stages.preprocess import figures


def test_classes_of_one_training_example_or_none_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    figures.report_classes(np.array([0, 0, 2, 2, 2, 3, 4, 4, 5, 5, 5]), "0123456")
    assert capsys.readouterr().err.splitlines(keepends=True)[1] == (
        "preprocess: classes with fewer than two training examples: 1 (0), 3 (1), 6 (0); `gradients` leaves them out "
        "of coherence_within_classes, and classes.csv has no coherence of such a class with itself\n"
    )
    figures.report_classes(np.array([0, 0, 1, 1]), "01")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((2, 3, 2), ""),
        ((30, 10, 20), "10 (owl) to 30 (cat) training examples\n"),
        ((31, 10, 20), "10 (owl) to 31 (cat) training examples; train.cross_entropy.class_weights: balanced gives"),
    ],
)
def test_unequal_classes_are_told(counts: tuple[int, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures.report_classes(np.repeat(np.arange(3), counts), ["cat", "owl", "yak"])
    line = capsys.readouterr().err
    assert line.startswith(f"preprocess: classes are unequal: {told}") if told else not line


def test_color_images_are_drawn_in_color_and_missing_ones_white(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(plotting, "save", lambda figure, _: saved.append(figure))
    train = color_split(30, shape=(8, 6))
    names = [f"class {label}" for label in range(NUM_CLASSES)]
    figures.draw_samples(tmp_path / "samples.png", train, "patches", NUM_CLASSES, names)
    captions = [text.get_text() for text in saved[0].axes[0].texts]
    assert captions == [f"class {label}\n{np.sum(train.labels == label)}" for label in range(NUM_CLASSES)]
    mosaic = np.asarray(saved[0].axes[0].images[0].get_array()).reshape(NUM_CLASSES, 8, 12, 6, 3)
    for label in range(NUM_CLASSES):
        np.testing.assert_array_equal(mosaic[label].swapaxes(0, 1)[:10], train.images[train.labels == label])
    assert np.all(mosaic[:, :, 10:] == 255)


def test_of_many_classes_the_first_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: dict[str, Figure] = {}
    monkeypatch.setattr(plotting, "save", lambda figure, path: saved.update({path.name: figure}))
    train = random_split(60, num_classes=256)
    figures.draw_samples(tmp_path / "samples.png", train, "idx", 256)
    rows, height = plotting.MAX_CLASSES, train.images.shape[1]
    assert len(np.asarray(saved["samples.png"].axes[0].images[0].get_array())) == rows * height
    assert saved["samples.png"].get_suptitle() == "Training examples by label, the first 20 of 256 (idx)"
