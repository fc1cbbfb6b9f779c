"""Random changes to images that preserve their class; drawn again in every compiled step."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt8, UInt32

from gradtrail.core.common.batching import normalize
from gradtrail.core.data.config import AugmentationConfig


def augment(
    images: Float[Array, "batch height width"], config: AugmentationConfig, *, key: Key[Array, " batch"]
) -> Float[Array, "batch height width"]:
    """Change each image by its own key; pixels from outside the image are 0."""

    def change(image: Array, key: Array) -> Array:
        transform_key, cutout_key = jax.random.split(key)
        if config.moves:
            image = _transformed(image, config, key=transform_key)
        return _cut_out(image, config.cutout, key=cutout_key) if config.cutout else image

    return jax.vmap(change)(images, key)


@functools.partial(jax.jit, static_argnames="config")
def deform(
    images: UInt8[Array, "batch height width"],
    example_id: Int[Array, " batch"],
    version: Int[Array, ""],
    seed: UInt32[Array, "2"],
    *,
    config: AugmentationConfig,
) -> UInt8[Array, "batch height width"]:
    """Change each image by the key of its version and example; pixels are rounded to the nearest of 0 to 255."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), version)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, example_id)
    changed = augment(normalize(images), config, key=keys)
    return jnp.round(jnp.clip(changed, 0.0, 1.0) * 255.0).astype(jnp.uint8)


def _transformed(image: Array, config: AugmentationConfig, *, key: Array) -> Array:
    """Resample an image under a random affine map, with linear interpolation."""
    down, right, turn, size, slant = jax.random.uniform(key, (5,), minval=-1.0, maxval=1.0)
    angle = turn * math.radians(config.rotation)
    scale = 1.0 + size * config.scale
    shear = jnp.tan(slant * math.radians(config.shear))
    cosine, sine = jnp.cos(angle) / scale, jnp.sin(angle) / scale
    rows, columns = _centred_grid(image.shape)
    from_rows = cosine * rows - sine * columns - down * config.shift
    from_columns = (sine + shear * cosine) * rows + (cosine - shear * sine) * columns - right * config.shift
    centre = [(side - 1) / 2 for side in image.shape]
    positions = [from_rows + centre[0], from_columns + centre[1]]
    return jax.scipy.ndimage.map_coordinates(image, positions, order=1, mode="constant", cval=0.0)


def _cut_out(image: Array, side: int, *, key: Array) -> Array:
    """Set a random square to 0."""
    height, width = image.shape
    centre_row, centre_column = jax.random.uniform(key, (2,)) * jnp.array([height, width], jnp.float32)
    rows = jnp.arange(height, dtype=jnp.float32)[:, None] + 0.5
    columns = jnp.arange(width, dtype=jnp.float32)[None, :] + 0.5
    inside = (jnp.abs(rows - centre_row) < side / 2) & (jnp.abs(columns - centre_column) < side / 2)
    return jnp.where(inside, 0.0, image)


def _centred_grid(shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Return each pixel's position relative to the image's centre."""
    rows, columns = (jnp.arange(side, dtype=jnp.float32) - (side - 1) / 2 for side in shape)
    return rows[:, None] * jnp.ones_like(columns)[None], columns[None] * jnp.ones_like(rows)[:, None]
