"""Random changes to images that preserve their class, within a compiled step."""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from gradtrail.core.config import Bounds, ConfigError, CountOrZero, Fraction, NotNegative, Share, config

_GREY = np.array([0.2989, 0.587, 0.114], np.float32)  # weights of red, green and blue, as in torchvision


@config
class AugmentationConfig:
    """Ranges of random changes to images; each is drawn uniformly between the negative and the positive value."""

    shift: NotNegative  # translation along both axes, in pixels
    rotation: Annotated[float, Bounds(at_least=0, at_most=180)]  # angle about the centre, in degrees
    scale: Share  # relative change of size; 0.1 for 90 % to 110 %
    shear: Annotated[float, Bounds(at_least=0, below=90)]  # slant of the rows, in degrees
    # side of a square that is set to 0, in pixels (DeVries and Taylor, arXiv 1708.04552); its centre is uniform over
    # the image
    cutout: CountOrZero
    flip: bool  # True if half of the images are mirrored, left to right
    # width of a border of copied edge pixels; a window of the image's size is cut out of both (as He et al., arXiv
    # 1512.03385, section 4.2), and each of its places is equally likely
    crop: CountOrZero
    # relative changes of colours, applied in this order, as torchvision's ColorJitter defines them
    brightness: Fraction
    contrast: Fraction
    saturation: Fraction
    # alpha of the Beta(alpha, alpha) distribution of an image's share in its mixture with another one of the batch
    # (Zhang et al., arXiv 1710.09412); 0 for no mixture
    mixup: Annotated[float, Bounds(at_least=0, at_most=100)]

    @property
    def moves(self) -> bool:
        """Whether any geometric change is configured."""
        return bool(self.shift or self.rotation or self.scale or self.shear)

    @property
    def recolors(self) -> bool:
        """Whether any change of colours is configured."""
        return bool(self.brightness or self.contrast or self.saturation)

    @property
    def enabled(self) -> bool:
        """Whether any change is configured."""
        return any(dataclasses.astuple(self))

    def check_images(self, shape: tuple[int, ...]) -> None:
        """Raise ConfigError, one line, for a change that images of this shape do not allow."""
        kind = f"images with {shape[2]} channels" if shape[2:] else "greyscale images"
        for name, allowed in {"contrast": ((), (3,)), "saturation": ((3,),)}.items():
            if shape[2:] not in allowed and (value := getattr(self, name)):
                raise ConfigError(f"train.augmentation.{name} must be 0 for {kind}, got {value}")
        if self.crop >= (side := min(shape[:2])):
            raise ConfigError(
                f"train.augmentation.crop must be below the shorter side of the images, {side}, got {self.crop}"
            )


NO_AUGMENTATION = AugmentationConfig(
    shift=0.0,
    rotation=0.0,
    scale=0.0,
    shear=0.0,
    cutout=0,
    flip=False,
    crop=0,
    brightness=0.0,
    contrast=0.0,
    saturation=0.0,
    mixup=0.0,
)


def augment(
    images: Float[Array, "batch height width *channels"], config: AugmentationConfig, *, key: Key[Array, " batch"]
) -> Float[Array, "batch height width *channels"]:
    """Change each image by its own key; pixels from outside the image are those at its edge.

    Flip, crop, geometric changes, colours and cutout follow each other. With k for the key, `fold_in(k, 2)` is the key
    of the flip, 3 of the crop and 4 of the colours; the other two are those of `split(k)`.
    """

    def change(image: Array, key: Array) -> Array:
        transform_key, cutout_key = jax.random.split(key)
        if config.flip:
            image = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 2)), image[:, ::-1], image)
        if config.crop:
            image = _cropped(image, config.crop, key=jax.random.fold_in(key, 3))
        if config.moves:
            image = _transformed(image, config, key=transform_key)
        if config.recolors:
            image = _recolored(image, config, key=jax.random.fold_in(key, 4))
        return _cut_out(image, config.cutout, key=cutout_key) if config.cutout else image

    return jax.vmap(change)(images, key)


def draw_shares(alpha: float, *, key: Key[Array, " batch"]) -> Float[Array, " batch"]:
    """Draw the share of each image in its mixture: the larger part of a Beta(alpha, alpha) distribution."""
    share = jax.vmap(lambda key: jax.random.beta(key, alpha, alpha))(key)
    return jnp.maximum(share, 1.0 - share)


def _cropped(image: Array, border: int, *, key: Array) -> Array:
    """Cut a random window of the image's size out of the image with a border of copied edge pixels."""
    padded = jnp.pad(image, [(border, border)] * 2 + [(0, 0)] * (image.ndim - 2), mode="edge")
    offsets = jax.random.randint(key, (2,), 0, 2 * border + 1)
    return jax.lax.dynamic_slice(padded, (*offsets, *[0] * (image.ndim - 2)), image.shape)


def _transformed(image: Array, config: AugmentationConfig, *, key: Array) -> Array:
    """Resample an image under a random affine map, with linear interpolation."""
    down, right, turn, size, slant = jax.random.uniform(key, (5,), minval=-1.0, maxval=1.0)
    angle = turn * math.radians(config.rotation)
    scale = 1.0 + size * config.scale
    shear = jnp.tan(slant * math.radians(config.shear))
    cosine, sine = jnp.cos(angle) / scale, jnp.sin(angle) / scale
    # Each pixel's position relative to the image's centre
    rows, columns = (jnp.arange(side, dtype=jnp.float32) - (side - 1) / 2 for side in image.shape[:2])
    rows, columns = rows[:, None] * jnp.ones_like(columns)[None], columns[None] * jnp.ones_like(rows)[:, None]
    from_rows = cosine * rows - sine * columns - down * config.shift
    from_columns = (sine + shear * cosine) * rows + (cosine - shear * sine) * columns - right * config.shift
    centre = [(side - 1) / 2 for side in image.shape[:2]]
    positions = [from_rows + centre[0], from_columns + centre[1]]

    def resample(channel: Array) -> Array:
        return jax.scipy.ndimage.map_coordinates(channel, positions, order=1, mode="nearest")

    return resample(image) if image.ndim == 2 else jax.vmap(resample, in_axes=-1, out_axes=-1)(image)


def _recolored(image: Array, config: AugmentationConfig, *, key: Array) -> Array:
    """Multiply the brightness, then the contrast, then the saturation by random factors; clip to 0..1 after each."""
    largest = jnp.array([config.brightness, config.contrast, config.saturation], jnp.float32)
    brightness, contrast, saturation = 1.0 + largest * jax.random.uniform(key, (3,), minval=-1.0, maxval=1.0)
    if config.brightness:
        image = _blended(image, 0.0, brightness)
    if config.contrast:
        image = _blended(image, jnp.mean(_grey(image)), contrast)
    if config.saturation:
        image = _blended(image, _grey(image)[..., None], saturation)
    return image


def _blended(image: Array, other: Array | float, factor: Array) -> Array:
    return jnp.clip(factor * image + (1.0 - factor) * other, 0.0, 1.0)


def _grey(image: Array) -> Array:
    return image if image.ndim == 2 else jnp.tensordot(image, _GREY, 1, precision="highest")


def _cut_out(image: Array, side: int, *, key: Array) -> Array:
    """Set a random square to 0, in all channels."""
    height, width = image.shape[:2]
    centre_row, centre_column = jax.random.uniform(key, (2,)) * jnp.array([height, width], jnp.float32)
    rows = jnp.arange(height, dtype=jnp.float32)[:, None] + 0.5
    columns = jnp.arange(width, dtype=jnp.float32)[None, :] + 0.5
    inside = (jnp.abs(rows - centre_row) < side / 2) & (jnp.abs(columns - centre_column) < side / 2)
    return jnp.where(jnp.expand_dims(inside, range(2, image.ndim)), 0.0, image)
