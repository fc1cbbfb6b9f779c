"""A data set may have 256 classes; figures show as many of them as can be read."""

from pathlib import Path

import numpy as np
import pytest
from factories import random_split
from matplotlib.figure import Figure

from gradtrail.stages.artifacts import plotting
from gradtrail.stages.preprocess import figures


def test_of_many_classes_the_first_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: dict[str, Figure] = {}
    monkeypatch.setattr(plotting, "save", lambda figure, path: saved.update({path.name: figure}))
    splits = {name: random_split(60, num_classes=256) for name in ("train", "test")}
    figures.draw(tmp_path, splits, "idx", 256)
    rows, height = plotting.MAX_CLASSES, splits["train"].images.shape[1]
    assert len(np.asarray(saved["samples.png"].axes[0].images[0].get_array())) == rows * height
    assert saved["samples.png"].get_suptitle() == "Training examples by label, the first 20 of 256 (idx)"
