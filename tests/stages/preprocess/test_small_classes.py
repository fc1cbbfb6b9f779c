"""Classes with too few training examples are named in one line."""

import numpy as np
import pytest

from gradtrail.stages.preprocess import small_classes


def test_classes_of_one_training_example_or_none_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    small_classes.warn(np.array([0, 0, 2, 3, 3]), 5, versions=1)
    assert capsys.readouterr().err == (
        "preprocess: classes with fewer than two training examples: 1 (0), 2 (1), 4 (0); `gradients` leaves them out "
        "of coherence_within_classes, and classes.csv has no coherence of such a class with itself\n"
    )


def test_two_versions_of_an_example_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    small_classes.warn(np.array([0, 1]), 2, versions=2)
    small_classes.warn(np.array([0, 0, 1, 1]), 2, versions=1)
    assert not capsys.readouterr().err
