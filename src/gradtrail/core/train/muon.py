"""Muon: orthogonalized momentum for kernels, Adam for biases and norms (Jordan, kellerjordan.github.io/posts/muon)."""

import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from optax import contrib

_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # coefficients of σ, σ³ and σ⁵, as published


def muon(
    rate: optax.Schedule, adam_rate: optax.Schedule, *, beta: float, weight_decay: float
) -> optax.GradientTransformation:
    """Return Muon for a pytree of parameters: the update of `optax.contrib.muon`, faster.

    Args:
        rate: learning rate of kernels: parameters with at least two axes, the last one that of the outputs.
        adam_rate: learning rate of all other parameters.
        beta: decay of the momentum.
        weight_decay: decay of kernels per step, times the rate.
    """
    kernels = optax.chain(
        contrib.scale_by_muon(beta=beta, ns_steps=0, weight_dimension_numbers=_kernel_axes),  # momentum of norm 1
        optax.stateless_with_tree_map(lambda momentum, _: _scaled_orthogonal(momentum)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    adam = optax.adam(adam_rate, nesterov=True)
    labels = functools.partial(jax.tree.map, lambda leaf: "kernels" if leaf.ndim > 1 else "others")
    return optax.partition({"kernels": kernels, "others": adam}, labels)


def orthogonalized(matrix: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Bring the singular values of a matrix of norm 1 near 1, by five Newton-Schulz iterations.

    An iteration multiplies the matrix by a polynomial of its Gram matrix G. The iterations are made on G and on the
    product of the polynomials alone, which are squares of the smaller side; the matrix itself is multiplied once at the
    end. In exact arithmetic that is the published X ← aX + bGX + cG²X; for 784 × 256 it has two thirds of the FLOPs.
    Squares amplify rounding, so products are float32 even if a processor would round their operands.
    """
    with jax.default_matmul_precision("highest"):
        return _orthogonalized(matrix)


def _orthogonalized(matrix: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    is_wide = len(matrix) < matrix.shape[1]
    gram = matrix @ matrix.T if is_wide else matrix.T @ matrix
    first, third, fifth = _COEFFICIENTS
    product = identity = jnp.eye(len(gram))
    for iteration in range(_ITERATIONS):
        factor = first * identity + third * gram + fifth * (gram @ gram)
        product = factor @ product if iteration else factor
        if iteration < _ITERATIONS - 1:
            gram = factor @ (factor @ gram)
    return product @ matrix if is_wide else matrix @ product


def _scaled_orthogonal(kernel: Float[Array, "..."]) -> Float[Array, "..."]:
    """Orthogonalize a kernel as a matrix, all input axes by the output axis; scale it as `optax.contrib.muon` does."""
    matrix = kernel.reshape(-1, kernel.shape[-1])
    scale = max(1.0, matrix.shape[1] / len(matrix)) ** 0.5
    return (orthogonalized(matrix) * scale).reshape(kernel.shape)


def _kernel_axes(params: PyTree[Array]) -> PyTree:
    """Return the axes by which Optax makes a kernel a matrix."""

    def axes(leaf: Array) -> contrib.MuonDimensionNumbers:
        return contrib.MuonDimensionNumbers(reduction_axis=tuple(range(leaf.ndim - 1)), output_axis=leaf.ndim - 1)

    return jax.tree.map(axes, params)
