"""What per-example gradients are by definition: oracles for code that never forms them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradtrail.core.nn.losses import Loss
from gradtrail.core.nn.models import Model, Params


def per_example_grads(model: Model, params: Params, images: Array, labels: Array, *, loss: Loss) -> Params:
    """Return the gradient of each example's loss, by `vmap(grad)`: like `params`, with a leading axis of examples."""

    def example_loss(params: Params, image: Array, label: Array) -> Array:
        return loss.per_example(model.apply(params, image[None]), label[None])[0]

    return jax.vmap(jax.grad(example_loss), in_axes=(None, 0, 0))(params, images, labels)


def per_example_norm(grads: Params) -> Float[Array, " batch"]:
    """Return the L2 norm over all leaves of each entry of the leading axis, accumulated in float32."""
    squares = (jnp.sum(jnp.square(leaf.reshape(len(leaf), -1)), axis=1) for leaf in jax.tree.leaves(grads))
    return jnp.sqrt(sum(squares, start=jnp.float32(0)))
