"""Random changes to images that preserve their class, within a compiled step."""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from gradtrail.core.config import Bounds, CountOrZero, NotNegative, Share, config


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

    @property
    def moves(self) -> bool:
        """Whether any geometric change is configured."""
        return bool(self.shift or self.rotation or self.scale or self.shear)

    @property
    def enabled(self) -> bool:
        """Whether any change is configured."""
        return any(dataclasses.astuple(self))


NO_AUGMENTATION = AugmentationConfig(shift=0.0, rotation=0.0, scale=0.0, shear=0.0, cutout=0, flip=False)


def augment(
    images: Float[Array, "batch height width *channels"], config: AugmentationConfig, *, key: Key[Array, " batch"]
) -> Float[Array, "batch height width *channels"]:
    """Change each image by its own key; pixels from outside the image are 0."""

    def change(image: Array, key: Array) -> Array:
        transform_key, cutout_key = jax.random.split(key)
        if config.flip:
            image = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 2)), image[:, ::-1], image)
        if config.moves:
            image = _transformed(image, config, key=transform_key)
        return _cut_out(image, config.cutout, key=cutout_key) if config.cutout else image

    return jax.vmap(change)(images, key)


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
        return jax.scipy.ndimage.map_coordinates(channel, positions, order=1, mode="constant", cval=0.0)

    return resample(image) if image.ndim == 2 else jax.vmap(resample, in_axes=-1, out_axes=-1)(image)


def _cut_out(image: Array, side: int, *, key: Array) -> Array:
    """Set a random square to 0, in all channels."""
    height, width = image.shape[:2]
    centre_row, centre_column = jax.random.uniform(key, (2,)) * jnp.array([height, width], jnp.float32)
    rows = jnp.arange(height, dtype=jnp.float32)[:, None] + 0.5
    columns = jnp.arange(width, dtype=jnp.float32)[None, :] + 0.5
    inside = (jnp.abs(rows - centre_row) < side / 2) & (jnp.abs(columns - centre_column) < side / 2)
    return jnp.where(jnp.expand_dims(inside, range(2, image.ndim)), 0.0, image)
