"""Figures of the data show the images of each label."""

import numpy as np
import pytest
from factories import NUM_CLASSES, random_split

from gradtrail.stages.preprocess import figures


@pytest.mark.parametrize("num_examples", [1, 40])
def test_each_row_has_the_first_examples_of_its_label(num_examples: int) -> None:
    split = random_split(num_examples)
    figure = figures.draw_samples(split, "digits", NUM_CLASSES, per_class=4)
    assert "digits" in figure.get_suptitle()
    assert len(figure.axes) == 4 * NUM_CLASSES
    for label in range(NUM_CLASSES):
        row = figure.axes[4 * label : 4 * label + 4]
        shown = [np.asarray(image.get_array()) for axis in row for image in axis.images]
        expected = [image for image, given in zip(split.images, split.labels, strict=True) if given == label][:4]
        np.testing.assert_array_equal(shown, expected)
    figure.draw_without_rendering()
