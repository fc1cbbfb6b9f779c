"""The curvature of the loss: products with the Hessian, and its largest eigenvalue, without the Hessian."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from gradtrail.core.models import HostParams, Params

_TINY = 1e-30  # below every norm that is no zero


def hessian_product(grad: Callable[[Params], Params], params: Params, direction: Params) -> Params:
    """Return the Hessian at `params` times a direction: the derivative of the gradient along it.

    Forward over reverse mode (Pearlmutter, Neural Computation 6(1), 1994): about twice the cost of a gradient.
    """
    return jax.jvp(grad, (params,), (direction,))[1]


def largest_eigenvalue(
    product: Callable[[Params], Params], params: Params | HostParams, iterations: int, *, key: Key[Array, ""]
) -> float:
    """Return the Hessian's eigenvalue of largest magnitude, by power iteration.

    Args:
        product: direction → the Hessian times it.
        params: whose shapes the direction has.
        iterations: products taken; from one to the next the error falls by the ratio of the two largest eigenvalues.
        key: of the direction to begin with.
    """
    direction = _unit(optax.tree.random_like(key, params, jax.random.normal))
    eigenvalue = jnp.float32(0)
    for _ in range(iterations):
        along = product(direction)
        eigenvalue = optax.tree.vdot(direction, along)
        direction = _unit(along)
    return float(eigenvalue)


def _unit(direction: Params) -> Params:
    norm = optax.tree.norm(direction)
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, _TINY), direction)
