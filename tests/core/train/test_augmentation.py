"""Images move as an affine map says, linearly interpolated.

The map is read off two images that hold each pixel's row and column: they come out with the position that each pixel
was taken from.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
from factories import color_split
from PIL import Image, ImageEnhance

from gradtrail.core.config import ConfigError
from gradtrail.core.train.augmentation import NO_AUGMENTATION, AugmentationConfig, augment, draw_shares

SHAPE = (15, 12)
CENTRE = np.array([7.0, 5.5])
NUM_IMAGES = 200
KEYS = jax.random.split(jax.random.key(0), NUM_IMAGES)
IMAGE = np.random.default_rng(0).uniform(size=SHAPE).astype(np.float32)
changed = jax.jit(augment, static_argnums=1)


def config(**overrides: Any) -> AugmentationConfig:
    return dataclasses.replace(NO_AUGMENTATION, **overrides)


ALL = config(shift=2.0, rotation=30.0, scale=0.3, shear=20.0)
NEW = config(crop=3, brightness=0.5, contrast=0.5)


def augmented(image: np.ndarray, settings: AugmentationConfig, keys: jax.Array = KEYS) -> np.ndarray:
    """Return one image changed by each of the keys."""
    images = np.broadcast_to(image.astype(np.float32), (NUM_IMAGES, *SHAPE))
    return np.asarray(changed(images, settings, key=keys))


@functools.cache
def maps(settings: AugmentationConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix and the offset of each key: where a pixel is taken from, relative to the centre."""
    grid = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"))
    rows, columns = (augmented(image, settings) for image in grid)
    insides = np.all(
        [(part > 1e-3) & (part < size - 1.001) for part, size in zip((rows, columns), SHAPE, strict=True)], axis=0
    )
    fits = []
    for taken_from, inside in zip(np.stack([rows, columns], axis=1), insides, strict=True):
        to = np.column_stack([grid[:, inside].T - CENTRE, np.ones(inside.sum())])
        positions = taken_from[:, inside].T - CENTRE
        fits.append(np.linalg.lstsq(to, positions)[0])
        np.testing.assert_allclose(to @ fits[-1], positions, atol=1e-3, err_msg="no affine map")
    return np.swapaxes(fits, 1, 2)[:, :, :2], np.array(fits)[:, 2]


def test_all_changes_together_are_a_turn_a_change_of_size_a_shear_and_a_shift() -> None:
    """A position is turned and scaled, then sheared along its row: row two of the matrix has a share of row one."""
    matrices, offsets = maps(ALL)
    first, second = matrices[:, 0], matrices[:, 1]
    squared = np.sum(first**2, axis=1)
    np.testing.assert_allclose(np.linalg.det(matrices), squared, rtol=1e-3)
    drawn = {
        "rotation": np.degrees(np.arctan2(-first[:, 1], first[:, 0])) / 30,
        "scale": (1 / np.sqrt(squared) - 1) / 0.3,
        "shear": np.degrees(np.arctan(np.sum(first * second, axis=1) / squared)) / 20,
        "down": -offsets[:, 0] / 2,
        "right": -offsets[:, 1] / 2,
    }
    for name, values in drawn.items():
        assert np.all(np.abs(values) < 1.001), name
        counts, _ = np.histogram(values, 4, (-1.001, 1.001))
        assert np.all(np.abs(counts / NUM_IMAGES - 0.25) < 5 * np.sqrt(0.25 * 0.75 / NUM_IMAGES)), f"{name} is uneven"
    correlations = np.corrcoef(list(drawn.values())) - np.eye(len(drawn))
    assert np.all(np.abs(correlations) < 5 / np.sqrt(NUM_IMAGES)), "each is drawn by itself"


def test_pixels_are_interpolated_as_by_scipy_with_those_at_the_edge_beyond_it() -> None:
    result = augmented(IMAGE, ALL)
    for index in range(20):
        matrix, offset = (part[index] for part in maps(ALL))
        beginning = CENTRE + offset - matrix @ CENTRE
        expected = scipy.ndimage.affine_transform(IMAGE, matrix, beginning, order=1, mode="nearest")
        np.testing.assert_allclose(result[index], expected, atol=1e-4)


@pytest.mark.parametrize("settings", [ALL, config(cutout=5), NEW], ids=["moves", "cutout", "crop and colors"])
def test_augmentation_is_a_function_of_the_key(settings: AugmentationConfig) -> None:
    result = augmented(IMAGE, settings)
    elsewhere = augmented(IMAGE, settings, jnp.roll(KEYS, 70).at[70:].set(KEYS[0]))
    np.testing.assert_array_equal(elsewhere[:70], result[-70:])
    assert len(np.unique(result[:20], axis=0)) > 10


@pytest.mark.parametrize("settings", [ALL, config(cutout=5), config(crop=3)], ids=["moves", "cutout", "crop"])
def test_all_channels_of_a_color_image_change_alike(settings: AugmentationConfig) -> None:
    images = jnp.asarray(color_split(20, shape=SHAPE).images / np.float32(255))
    result = changed(images, settings, key=KEYS[:20])
    assert result.shape == images.shape
    for channel in range(3):
        alone = changed(images[..., channel], settings, key=KEYS[:20])
        np.testing.assert_allclose(result[..., channel], alone, atol=1e-6)


@pytest.mark.parametrize("side", [4, 5])
def test_cutout_blanks_one_square(side: int) -> None:
    image = IMAGE + 1
    result = augmented(image, config(cutout=side))
    is_blank = result == 0
    np.testing.assert_array_equal(result[~is_blank], np.broadcast_to(image, result.shape)[~is_blank])
    assert np.all(np.any(is_blank, axis=0)), "every pixel sometimes"
    for blank in is_blank:
        for lines, size in ((np.any(blank, axis=1), 15), (np.any(blank, axis=0), 12)):
            first, last = np.flatnonzero(lines)[[0, -1]]
            at_edge = first == 0 or last == size - 1
            assert last - first + 1 == lines.sum()
            assert side // 2 <= lines.sum() <= side if at_edge else lines.sum() == side
        assert blank.sum() == np.any(blank, axis=1).sum() * np.any(blank, axis=0).sum()


@pytest.mark.parametrize("settings", [ALL, config(crop=3)], ids=["moves", "crop"])
def test_white_paper_stays_white(settings: AugmentationConfig) -> None:
    np.testing.assert_allclose(augmented(np.ones(SHAPE), settings), 1, atol=1e-6)


def test_about_half_of_the_images_are_mirrored_and_the_others_as_they_were() -> None:
    images = augmented(IMAGE, config(flip=True))
    mirrored = (images == IMAGE[:, ::-1]).all(axis=(1, 2))
    assert (mirrored | (images == IMAGE).all(axis=(1, 2))).all()
    assert 60 < mirrored.sum() < 140
    assert config(flip=True).enabled


def draws(number: int, draw: Callable[[jax.Array], jax.Array]) -> np.ndarray:
    """Return what is drawn by `fold_in(key, number)` for each key."""
    return np.asarray(jax.vmap(lambda key: draw(jax.random.fold_in(key, number)))(KEYS))


def test_crops_are_windows_of_the_image_with_copies_of_its_edge() -> None:
    """Of a border of 3 pixels there are 49; each place is equally likely."""
    padded, (height, width) = np.pad(IMAGE, 3, mode="edge"), SHAPE
    offsets = draws(3, lambda key: jax.random.randint(key, (2,), 0, 7))
    expected = [padded[row : row + height, column : column + width] for row, column in offsets]
    np.testing.assert_array_equal(augmented(IMAGE, config(crop=3)), expected)
    for axis in range(2):
        counts = np.bincount(offsets[:, axis], minlength=7)
        assert np.all(np.abs(counts / NUM_IMAGES - 1 / 7) < 5 * np.sqrt(6 / 49 / NUM_IMAGES))


def blended(images: np.ndarray, others: Any, factors: np.ndarray) -> np.ndarray:
    factors = factors[:, None, None, None]
    return np.clip(factors * images + (1 - factors) * others, 0, 1)


def test_colors_change_as_by_torchvision() -> None:
    images = color_split(NUM_IMAGES, shape=SHAPE).images / np.float32(255)
    settings = config(brightness=0.9, contrast=0.8, saturation=0.7)
    factors = draws(4, lambda key: jax.random.uniform(key, (3,), minval=-1, maxval=1)).T
    brightness, contrast, saturation = 1 + np.array([[0.9], [0.8], [0.7]]) * factors
    grey = np.array([0.2989, 0.587, 0.114])
    bright = blended(images, 0, brightness)
    contrasted = blended(bright, np.mean(bright @ grey, axis=(1, 2))[:, None, None, None], contrast)
    expected = blended(contrasted, (contrasted @ grey)[..., None], saturation)
    result = np.asarray(changed(images, settings, key=KEYS))
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert np.mean(expected == 1) > 0.02, "else the order would make no difference"
    # torchvision has Pillow do it, which rounds to whole levels after each operation, and the mean of the grey as well
    for index in range(20):
        image = Image.fromarray(np.round(images[index] * 255).astype(np.uint8))
        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for enhance, factor in zip(enhancers, (brightness[index], contrast[index], saturation[index]), strict=True):
            image = enhance(image).enhance(factor)
        np.testing.assert_allclose(result[index], np.asarray(image) / 255, atol=5 / 255)


@pytest.mark.parametrize(
    ("name", "channels", "kind"),
    [
        ("saturation", (), "greyscale images"),
        ("saturation", (4,), "images with 4 channels"),
        ("contrast", (4,), "images with 4 channels"),
    ],
)
def test_colors_change_where_they_are_defined(name: str, channels: tuple[int, ...], kind: str) -> None:
    changing = config(**{name: 0.1})
    with pytest.raises(ConfigError, match=rf"^train\.augmentation\.{name} must be 0 for {kind}, got 0\.1$"):
        changing.check_images((8, 8, *channels))
    changing.check_images((8, 8, 3))


def test_contrast_of_a_greyscale_image_is_about_its_mean() -> None:
    factors = 1 + 0.5 * draws(4, lambda key: jax.random.uniform(key, (3,), minval=-1, maxval=1))[:, 1]
    expected = blended(IMAGE[None, ..., None], IMAGE.mean(), factors)[..., 0]
    np.testing.assert_allclose(augmented(IMAGE, config(contrast=0.5)), expected, atol=1e-5)


@pytest.mark.parametrize("alpha", [1e-30, 0.2, 1.0, 100.0])
def test_shares_of_mixtures_are_the_larger_part_of_a_beta_distribution(alpha: float) -> None:
    shares = np.asarray(draw_shares(alpha, key=jax.random.split(jax.random.key(1), 2_000)))
    assert shares.min() >= 0.5
    assert shares.max() <= 1
    distribution = scipy.stats.beta(alpha, alpha)
    assert alpha < 0.1 or scipy.stats.kstest(shares, lambda x: 2 * distribution.cdf(x) - 1).pvalue > 1e-3
    assert alpha > 0.1 or np.all(shares == 1)
