"""Oriented gradients: their definition in loops, what they do not depend on, and images of every shape."""

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradtrail.core.nn.features import (
    NORM,
    NUM_FEATURES,
    features_of,
    features_shape,
    gradient_features,
    straightened,
)

SHAPES = [(28, 28), (8, 8), (4, 3), (1, 1)]
FEATURES = jax.jit(gradient_features)
STRAIGHTENED = jax.jit(straightened)


def draw(shape: tuple[int, int], count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).uniform(size=(count, *shape)).astype(np.float32)


def defined(image: np.ndarray) -> np.ndarray:
    """The features of one image, in loops over pixels, cells and directions, in float64."""
    height, width = image.shape
    pixels = np.pad(image.astype(np.float64), 1)
    cells = list(itertools.product(range(8), range(8)))
    result = {cell: np.zeros(8) for cell in cells}
    for row, column, (i, j) in itertools.product(range(height), range(width), cells):
        across = pixels[row + 1, column + 2] - pixels[row + 1, column]
        down = pixels[row + 2, column + 1] - pixels[row, column + 1]
        y, x = (row + 0.5) * 8 / height - (i + 0.5), (column + 0.5) * 8 / width - (j + 0.5)
        weight = math.exp(-(x**2 + y**2) / (2 * 0.7**2)) * math.hypot(across, down)
        for index in range(8):
            cosine = math.cos(math.atan2(down, across) - index * math.pi / 4)
            result[i, j][index] += weight * max(0.0, cosine) ** 4
    near = {
        a: sum(math.exp(-(math.dist(a, b) ** 2) / (2 * 1.5**2)) * np.sum(result[b] ** 2) for b in cells) for a in cells
    }
    floor = 0.1 * np.mean(list(near.values()))
    normal = {cell: result[cell] / math.sqrt(near[cell] + floor) for cell in cells}
    parts = [normal[cell] - normal[cell].mean() for cell in cells]
    pairs = [(i, j) for i in range(8) for j in range(i, 8)]
    lengths = [math.sqrt(np.sum(part**2) + 1e-6) for part in parts]
    products = [
        part[i] * part[j] / length * (1 if i == j else math.sqrt(2))
        for part, length in zip(parts, lengths, strict=True)
        for i, j in pairs
    ]
    return np.concatenate(
        [NORM / math.sqrt(2) * np.array(item).ravel() / np.linalg.norm(item) for item in (parts, products)]
    )


@pytest.mark.parametrize("shape", [(6, 9), (4, 3)])
def test_oriented_gradients_equal_the_definition(shape: tuple[int, int]) -> None:
    images = draw(shape, 2)
    result = FEATURES(images)
    assert result.shape == (2, NUM_FEATURES) == (2, 64 * (8 + 36))
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, [defined(image) for image in images], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_features_have_one_norm_none_of_empty_images_and_do_not_depend_on_the_batch(shape: tuple[int, int]) -> None:
    images = draw(shape) * np.array([1, 1, 0], np.float32)[:, None, None]
    result = FEATURES(images)
    assert result.shape == (3, *features_shape("oriented_gradients", shape))
    np.testing.assert_allclose(np.linalg.norm(result, axis=1), [NORM, NORM, 0] if shape != (1, 1) else 0, rtol=1e-4)
    np.testing.assert_allclose(STRAIGHTENED(images)[2], 0)
    whole = jax.jit(lambda images: features_of(images, "oriented_gradients"))
    assert np.all(np.isfinite(whole(images)))
    np.testing.assert_allclose(whole(images)[1:2], whole(images[1:2]), atol=1e-5)


def defined_straight(image: np.ndarray) -> np.ndarray:
    """A straightened image, in loops over pixels, in float64."""
    height, width = image.shape
    pixels = list(itertools.product(range(height), range(width)))
    mass = image.astype(np.float64).sum()

    def mean(identity: Callable[[int, int], float]) -> float:
        return sum(image[y, x] * identity(y, x) for y, x in pixels) / mass

    middle_y, middle_x = mean(lambda y, x: y), mean(lambda y, x: x)
    slope = mean(lambda y, x: (y - middle_y) * (x - middle_x)) / mean(lambda y, x: (y - middle_y) ** 2)
    sd = math.sqrt(mean(lambda y, x: (x - middle_x - slope * (y - middle_y)) ** 2))
    stretch = min(max(width / 7 / sd, 2 / 3), 3 / 2)
    result = np.zeros(image.shape)
    for y, x in pixels:
        source = middle_x + slope * (y - middle_y) + (x - (width - 1) / 2) / stretch
        result[y, x] = np.interp(source, np.arange(-1, width + 1), np.pad(image[y], 1))
    return result


@pytest.mark.parametrize("shape", [(6, 9), (4, 3), (28, 28)])
def test_straightened_images_equal_the_definition(shape: tuple[int, int]) -> None:
    images = draw(shape, 2)
    result = STRAIGHTENED(images)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, [defined_straight(image) for image in images], atol=1e-4)
