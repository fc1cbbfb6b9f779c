"""Random changes to images that preserve their class: within a compiled step, or as deformed versions of a split."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt8, UInt32

from gradtrail.core.batching import normalize
from gradtrail.core.data import AugmentationConfig, Split

_PART = 4096  # examples per call
_STREAM = 3  # stream of random numbers of a seed; `data` uses 0 to 2, a training 0


def augment(
    images: Float[Array, "batch height width *channels"], config: AugmentationConfig, *, key: Key[Array, " batch"]
) -> Float[Array, "batch height width *channels"]:
    """Change each image by its own key; pixels from outside the image are 0."""

    def change(image: Array, key: Array) -> Array:
        transform_key, cutout_key = jax.random.split(key)
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


def versions_of(
    split: Split,
    count: int,
    config: AugmentationConfig,
    *,
    seed: int,
    num_ids: int,
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[Split]:
    """Yield `count` versions of a split in parts, version by version; the first version is the split itself.

    Version v of example i has the `example_id` v · num_ids + i: ids stay unique, and example_id % num_ids is the
    source example. All labels are the source's, and the pixels are a function of its image, `config`, `seed`, v and i
    alone. MNIST8M has 135 versions of each digit (Loosli, Canu and Bottou, 2007).

    Args:
        num_ids: a number larger than any `example_id` of the split.
        advance: called with the number of examples of each part.
    """
    stream = np.array([_STREAM, seed], np.uint32)
    for version in range(count):
        for start in range(0, len(split), _PART):
            part = split[start : start + _PART]
            if version:
                filling = _PART - len(part)  # so that one program deforms all parts
                images = np.pad(part.images, [(0, filling), *[(0, 0)] * (part.images.ndim - 1)])
                ids = np.pad(part.example_id, (0, filling))
                deformed = np.asarray(_deformed(images, ids, np.int32(version), stream, config=config))
                new_ids = part.example_id + np.int32(version * num_ids)
                part = dataclasses.replace(part, images=deformed[: len(part)], example_id=new_ids)
            advance(len(part))
            yield part


@functools.partial(jax.jit, static_argnames="config")
def _deformed(
    images: UInt8[Array, "batch height width *channels"],
    example_id: Int[Array, " batch"],
    version: Int[Array, ""],
    seed: UInt32[Array, "2"],
    *,
    config: AugmentationConfig,
) -> UInt8[Array, "batch height width *channels"]:
    """Change each image by the key of its version and example; pixels are rounded to the nearest of 0 to 255."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), version)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, example_id)
    changed = augment(normalize(images), config, key=keys)
    return jnp.round(jnp.clip(changed, 0.0, 1.0) * 255.0).astype(jnp.uint8)
