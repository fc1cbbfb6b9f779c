"""Activations that the backward pass computes again in place of keeping them: less memory, more work."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, PyTree


def rematerialized(
    function: Callable[[PyTree, Array], Float[Array, "..."]],
) -> Callable[[PyTree, Array], Float[Array, "..."]]:
    """Return `function` of parameters and inputs, keeping nothing but those two for its reverse-mode derivative.

    What `jax.checkpoint` is for. On a CPU that has no effect: XLA drops its barriers before it merges equal
    computations, and FLOPs and memory come out the same (jaxlib 0.10.2). Here the second computation depends on the
    cotangent, by a zero that the compiler cannot prove to be one, so that it is neither merged nor done early.
    """

    @jax.custom_vjp
    def call(params: PyTree, inputs: Array) -> Array:
        return function(params, inputs)

    def forward(params: PyTree, inputs: Array) -> tuple[Array, tuple[PyTree, Array]]:
        return function(params, inputs), (params, inputs)

    def backward(residuals: tuple[PyTree, Array], cotangent: Array) -> Any:
        params, inputs = residuals
        zero = 0.0 * cotangent[(0,) * cotangent.ndim]  # of cotangents that are not finite no gradient is finite anyway
        _, pull_back = jax.vjp(function, params, inputs + zero)
        return pull_back(cotangent)

    call.defvjp(forward, backward)
    return call
