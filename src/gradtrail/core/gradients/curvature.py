"""The sharpness of a training loss: the largest eigenvalue of its Hessian, by products of that with vectors."""

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from gradtrail.core.data import Split
from gradtrail.core.nn.losses import Loss
from gradtrail.core.nn.models import HostParams, Model, Params
from gradtrail.core.xla.passes import Pass

Vector: TypeAlias = Float[np.ndarray, " size"]  # float64
EXAMPLES = 512  # training examples, evenly spaced, of whose mean loss it is; on MNIST within a fifth of 8,192
_ITERATIONS = 8  # of Lanczos: on MNIST within half a percent of 30
_SEED = 0  # of the first vector


def hessian_product(
    model: Model,
    params: Params,
    vector: Params,
    images: UInt8[Array, "batch height width *channels"],
    labels: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
    *,
    loss: Loss,
) -> Params:
    """Multiply the Hessian of the summed loss of the examples where `mask` is true by a vector like the parameters.

    It is the derivative of the gradient along the vector, forward over reverse mode, which takes about twice the FLOPs
    of the gradient (B. Pearlmutter, Neural Computation 6(1), 1994).
    """

    def summed(params: Params) -> Array:
        return jnp.sum(jnp.where(mask, loss.per_example(model.apply(params, images), labels), 0.0))

    return jax.jvp(jax.grad(summed), (params,), (vector,))[1]


def sharpness(products: Pass, params: Params | HostParams, train: Split) -> float:
    """Return the largest eigenvalue of the Hessian of the mean loss over at most `EXAMPLES` of a split."""
    count = min(len(train), EXAMPLES)
    rows = np.arange(count) * len(train) // count
    batches = [
        products.masked_batch(train, part)
        for part in np.split(rows, range(products.batch_size, count, products.batch_size))
    ]
    leaves, structure = jax.tree.flatten(params)
    ends = np.cumsum([leaf.size for leaf in leaves])

    def product(vector: Vector) -> Vector:
        parts = np.split(vector.astype(np.float32), ends[:-1])
        shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        vectors, total = jax.device_put(jax.tree.unflatten(structure, shaped)), np.zeros(ends[-1])
        for batch in batches:
            found = jax.tree.leaves(products.function(params, vectors, *batch))
            total += np.concatenate([np.ravel(leaf) for leaf in found])
        return total / count

    return largest_eigenvalue(product, int(ends[-1]), _ITERATIONS, seed=_SEED)


def largest_eigenvalue(
    product: Callable[[Float[np.ndarray, " size"]], Float[np.ndarray, " size"]],
    size: int,
    iterations: int,
    *,
    seed: int,
) -> float:
    """Return the largest eigenvalue of a symmetric matrix, which only `product` knows, by Lanczos' iteration.

    The first vector is drawn from a normal distribution. Every vector is made orthogonal to all before it (G. Golub and
    C. Van Loan, Matrix Computations, 10.3.1), in float64, without a BLAS, whose order of additions varies. NaN if a
    product is not finite.
    """
    from scipy.linalg import eigvalsh_tridiagonal

    vector = np.random.default_rng(seed).normal(size=size)
    basis, diagonal, off_diagonal = list[np.ndarray](), list[float](), list[float]()
    norm = math.sqrt(_dot(vector, vector))
    for _ in range(min(iterations, size)):
        basis.append(vector / norm)
        vector = product(basis[-1])
        diagonal.append(_dot(vector, basis[-1]))
        for known in (*basis, *basis):  # twice: the first time leaves rounding errors
            vector = vector - _dot(vector, known) * known
        norm = math.sqrt(_dot(vector, vector))
        if not norm > 1e-7 * abs(diagonal[0]):  # the vectors span all that the matrix reaches, or it is not finite
            break
        off_diagonal.append(norm)
    if not np.isfinite(diagonal).all():
        return math.nan
    last = len(diagonal) - 1
    found = eigvalsh_tridiagonal(
        diagonal, off_diagonal[:last], select="i", select_range=(last, last), lapack_driver="stebz"
    )
    return float(found[0])


def _dot(left: Vector, right: Vector) -> float:
    return float(np.sum(left * right))
