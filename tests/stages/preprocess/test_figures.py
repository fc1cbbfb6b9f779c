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
    drawn = np.asarray(figure.axes[0].images[0].get_array())
    height, width = split.images.shape[1:]
    assert drawn.shape == (NUM_CLASSES * height, 4 * width)
    for label, row in enumerate(np.split(drawn, NUM_CLASSES)):
        images = np.split(row, 4, axis=1)
        expected = [
            image for image, image_label in zip(split.images, split.labels, strict=True) if image_label == label
        ][:4]
        np.testing.assert_array_equal(images, [*expected, *np.zeros((4 - len(expected), height, width), np.uint8)])
    figure.draw_without_rendering()
