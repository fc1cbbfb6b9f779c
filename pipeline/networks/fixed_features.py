"""A perceptron on fixed features of images, which have no parameters and look at one image alone.

In a private training they cost no privacy, and a linear layer on them needs few noised gradients (Tramèr and Boneh,
arXiv 2011.11660).
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from gradtrail.core.config import ConfigError, Share, config
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.layers import ActivationKind, Tap
from gradtrail.core.nn.mlp import Perceptron, Width

CELLS = 8  # cells along each side of an image, whatever its size
ORIENTATIONS = 8  # directions of a whole turn
NUM_FEATURES = CELLS**2 * (ORIENTATIONS + ORIENTATIONS * (ORIENTATIONS + 1) // 2)
NORM = 12.0  # L2 norm of the features of an image, about the best for a linear layer with `example_clip_norm: 1`
_WIDTH = 1 / 7  # standard deviation of the columns of a straightened image, in widths of the image
_STRETCH = 1.5  # largest factor by which an image is made wider or narrower
_SHARPNESS = 4  # power of the cosine between a gradient and a direction
_REACH = 0.7  # standard deviation of a cell's window, in distances between cells
_NEIGHBORHOOD = 1.5  # standard deviation of the neighborhood whose energy a cell is divided by, in the same unit
_FLOOR = 0.1  # added to that energy, as share of the mean over the image: nearly empty cells stay small
_FAINT = 1e-6  # added to ‖h‖², before products are divided by it
_TINY = 1e-9  # added to squares before a root or a quotient, so that an image of one gray level has no NaN


@config
class Network:
    """The keys of `train.own`, beside `file`."""

    # oriented gradients are `gradient_features` of straightened images
    kind: Literal["oriented_gradients", "straightened_pixels"] = "oriented_gradients"
    hidden: tuple[Width, ...] = ()  # width of each hidden layer; none for a linear layer
    activation: ActivationKind = "relu"
    dropout: Share = 0.0  # probability that a training step sets a hidden unit to zero

    def build(self, shape: tuple[int, ...], num_classes: int, *, precision: Precision, rngs: nnx.Rngs) -> "OnFeatures":
        """Return the network; raise ConfigError for color images: features are of the brightness of a stroke."""
        if len(shape) == 3:
            raise ConfigError(f"fixed_features must have grayscale images, got images of shape {shape}")
        num_features = NUM_FEATURES if self.kind == "oriented_gradients" else math.prod(shape)
        widths = [num_features, *self.hidden, num_classes]
        network = OnFeatures(widths, self.activation, self.dropout, precision=precision, rngs=rngs)
        network.kind = self.kind
        return network


class OnFeatures(Perceptron):
    """Dense layers on features."""

    kind: str

    def __call__(self, inputs: Float[Array, "batch height width"], key: Key[Array, " batch"] | None, tap: Tap) -> Array:
        upright = straightened(inputs)
        return super().__call__(gradient_features(upright) if self.kind == "oriented_gradients" else upright, key, tap)


def straightened(images: Float[Array, "batch height width"]) -> Float[Array, "batch height width"]:
    """Return the images sheared to stand upright, stretched to one width, and moved to the middle of their columns.

    The slant and the width of handwriting depend more on the writer than on the character (LeCun et al., Proceedings of
    the IEEE 86(11), 1998, section III-A, use deslanted digits). With the brightness of a pixel as its mass, x its
    column, y its row, and x̄, ȳ the means over an image:

    1. The slant is cov(x, y) / var(y), the slope of the regression of columns on rows.
    2. The width is the standard deviation that remains, √(var(x) - cov(x, y)² / var(y)). The stretch is a seventh of
       the width of the image over that, but at most 3/2 and at least 2/3.
    3. Row y, column x of the result is the image at row y, column x̄ + slant (y - ȳ) + (x - middle) / stretch, linearly
       interpolated; beyond its edges the image is 0.

    An image without any brightness is unchanged.
    """
    height, width = images.shape[1:]
    rows, columns = (np.arange(size, dtype=np.float32)[None] for size in (height, width))
    mass = jnp.sum(images, axis=(1, 2))[:, None] + _TINY
    by_row, by_column = jnp.sum(images, axis=2) / mass, jnp.sum(images, axis=1) / mass
    middle = jnp.sum(by_column * columns, axis=1, keepdims=True)
    below_mean, right_of_mean = rows - jnp.sum(by_row * rows, axis=1, keepdims=True), columns - middle
    covariance = jnp.einsum("bhw,bh,bw->b", images, below_mean, right_of_mean)[:, None] / mass
    slant = covariance / (jnp.sum(by_row * below_mean**2, axis=1, keepdims=True) + _TINY)
    variance = jnp.sum(by_column * right_of_mean**2, axis=1, keepdims=True) - slant * covariance
    narrowing = jnp.sqrt(jnp.maximum(variance, _TINY)) / (_WIDTH * width)
    narrowing = jnp.clip(narrowing, 1 / _STRETCH, _STRETCH)
    source_offsets = middle + narrowing * (columns - (width - 1) / 2)
    source = source_offsets[:, None] + (slant * below_mean)[..., None]
    left = jnp.floor(source)
    share = source - left

    def pixels_at(columns: Float[Array, "batch height width"]) -> Float[Array, "batch height width"]:
        """Return the pixel of the row at each integer column; 0 beyond the edges."""
        pixels = jnp.take_along_axis(images, jnp.clip(columns, 0, width - 1).astype(jnp.int32), axis=2)
        return jnp.where((columns >= 0) & (columns <= width - 1), pixels, 0.0)

    return (1 - share) * pixels_at(left) + share * pixels_at(left + 1)


def gradient_features(images: Float[Array, "batch height width"]) -> Float[Array, "batch features"]:
    """Return histograms of the contrast's directions in each part of an image, and products of pairs of directions.

    After histograms of oriented gradients (Dalal and Triggs, CVPR 2005, doi 10.1109/CVPR.2005.177) with smooth bins
    and windows, and products within a cell instead of between cells (Watanabe et al., PSIVT 2009,
    doi 10.1007/978-3-540-92957-4_4):

    1. The gradient g of each pixel by central differences; beyond its edges the image is 0.
    2. For each direction u of 8 in a whole turn, ‖g‖ max(0, cos ∠(g, u))⁴.
    3. Of these the sums over Gaussian windows around 8 × 8 cells, which overlap: a vector h of 8 for each cell.
    4. h / √(E + 0.1 mean(E)), less its mean over directions; E is the sum of ‖h‖² over a Gaussian neighborhood of the
       cell, its mean is that over all cells. Without the mean, which all images share, few steps go far.
    5. The products of h with itself in each cell, divided by ‖h‖, 36 for 8: √2 h_i h_j / ‖h‖ for i < j and h_i² / ‖h‖.
    6. All h of an image, and all products, each scaled to the L2 norm 12 / √2.

    Every image therefore has features of the L2 norm 12, or 0 if it has one gray level and no edge. Multiplied contrast
    leaves the features unchanged; added brightness changes them at the edges alone. A cell is an eighth of the height
    and of the width; the 64 · 8 features h come cell by cell, row after row, then the 64 · 36 products.
    """
    bins = _histograms(images)
    energy = jnp.sum(bins**2, axis=-1)
    around = _gaussian(np.arange(CELLS), np.arange(CELLS), _NEIGHBORHOOD)
    nearby = jnp.einsum("ik,bkl,jl->bij", around, energy, around)
    floor = _FLOOR * jnp.mean(nearby, axis=(1, 2), keepdims=True)
    contrast = bins * jax.lax.rsqrt(nearby + floor + _TINY)[..., None]
    centered = contrast - jnp.mean(contrast, axis=-1, keepdims=True)
    first, second = np.triu_indices(ORIENTATIONS)
    weights = np.where(first == second, 1.0, math.sqrt(2)).astype(np.float32)[None, None, None]
    length = jax.lax.rsqrt(jnp.sum(centered**2, axis=-1, keepdims=True) + _FAINT)
    # Slices, since a gather of the pairs takes several times as long on a CPU
    pairs = [centered[..., one : one + 1] * centered[..., one:] for one in range(ORIENTATIONS)]
    products = jnp.concatenate(pairs, axis=-1) * length * weights
    return jnp.concatenate([_scaled(centered), _scaled(products)], axis=1)


def _histograms(images: Array) -> Float[Array, "batch cells cells orientations"]:
    """Return the sums of contrast by direction around each cell."""
    height, width = images.shape[1:]
    padded = jnp.pad(images, [(0, 0), (1, 1), (1, 1)])
    across, down = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2], padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    inverse = jax.lax.rsqrt(across**2 + down**2 + _TINY)
    angles = np.arange(ORIENTATIONS) * 2 * np.pi / ORIENTATIONS
    cosines, sines = (function(angles).astype(np.float32)[None, :, None, None] for function in (np.cos, np.sin))
    along = jax.nn.relu(cosines * (across * inverse)[:, None] + sines * (down * inverse)[:, None])
    votes = along**_SHARPNESS / inverse[:, None]
    # The weight of each row and of each column of pixels in each cell
    points = [(np.arange(size) + 0.5) * CELLS / size for size in (height, width)]
    windows = [_gaussian(np.arange(CELLS) + 0.5, point, _REACH) for point in points]
    return jnp.einsum("bohj,ih->bijo", jnp.einsum("bohw,jw->bohj", votes, windows[1]), windows[0])


def _gaussian(centers: np.ndarray, points: np.ndarray, sd: float) -> Float[np.ndarray, "centers points"]:
    return np.exp(-0.5 * ((points - centers[:, None]) / sd) ** 2).astype(np.float32)


def _scaled(features: Float[Array, "batch cells cells kinds"]) -> Float[Array, "batch features"]:
    flat = features.reshape(features.shape[0], -1)
    return NORM / math.sqrt(2) * flat * jax.lax.rsqrt(jnp.sum(flat**2, axis=1, keepdims=True) + _TINY)
