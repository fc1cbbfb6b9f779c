"""Rematerialization: the backward pass recomputes activations instead of storing them; less memory, more work."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, PyTree


def rematerialized(
    function: Callable[[PyTree, Array], Float[Array, "..."]],
) -> Callable[[PyTree, Array], Float[Array, "..."]]:
    """Return `function` with a reverse-mode derivative that stores only its parameters and inputs.

    This is the purpose of `jax.checkpoint`, which has no effect on CPU: XLA removes its barriers before it merges equal
    computations, so FLOPs and memory stay the same (jaxlib 0.10.2). Here the recomputation depends on the
    cotangent through a zero that the compiler cannot prove to be one, so it is neither merged nor moved forward.
    """

    @jax.custom_vjp
    def call(params: PyTree, inputs: Array) -> Array:
        return function(params, inputs)

    def forward(params: PyTree, inputs: Array) -> tuple[Array, tuple[PyTree, Array]]:
        return function(params, inputs), (params, inputs)

    def backward(residuals: tuple[PyTree, Array], cotangent: Array) -> Any:
        params, inputs = residuals
        # NaN if the cotangent is not finite, and then the gradient is not finite either
        zero = 0.0 * cotangent[(0,) * cotangent.ndim]
        _, pull_back = jax.vjp(function, params, inputs + zero)
        return pull_back(cotangent)

    call.defvjp(forward, backward)
    return call
