"""What per-example gradients are by definition: oracles for code that never forms them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jaxtyping import Array, Float

from gradtrail.core.nn.losses import CrossEntropy, Loss
from gradtrail.core.nn.models import Model, Params


def per_example_grads(model: Model, params: Params, images: Array, labels: Array, *, loss: Loss) -> Params:
    """Return the gradient of each example's loss, by `vmap(grad)`: like `params`, with a leading axis of examples."""

    def example_loss(params: Params, image: Array, label: Array) -> Array:
        return loss.per_example(model.apply(params, image[None]), label[None])[0]

    return jax.vmap(jax.grad(example_loss), in_axes=(None, 0, 0))(params, images, labels)


def per_example_norm(grads: Params) -> Float[np.ndarray, " batch"]:
    """Return the L2 norm over all leaves of each entry of the leading axis."""
    rows = [np.reshape(leaf, (len(leaf), -1)) for leaf in jax.tree.leaves(grads)]
    return np.linalg.norm(np.concatenate(rows, axis=1), axis=1)


def float64_scores(
    model: Model, params: Params, images: np.ndarray, labels: np.ndarray, *, loss: CrossEntropy
) -> dict[str, Float[np.ndarray, " batch"]]:
    """Return the scores of each example of uint8 images by their definitions, in float64: no operand is rounded."""
    exact = Model(dataclasses.replace(model.config, precision="float32"))

    @jax.jit
    def logits_and_grads(params: Params, pixels: Array) -> tuple[Array, dict[str, Params]]:
        grads = per_example_grads(exact, params, pixels, jnp.asarray(labels), loss=loss)
        return exact.apply(params, pixels), exact.split_by_layer(grads)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        logits, grads = jax.device_get(logits_and_grads(wide, jnp.asarray(images / 255.0)))
    rows = np.arange(len(labels))
    log_softmax, is_label = scipy.special.log_softmax(logits, axis=1), np.eye(logits.shape[1])[labels]
    target = (1 - loss.label_smoothing) * is_label + loss.label_smoothing / logits.shape[1]
    softmax = np.exp(log_softmax)
    norms = {
        f"grad_norm_{name}": np.sqrt(sum(np.sum(leaf.reshape(len(leaf), -1) ** 2, 1) for leaf in jax.tree.leaves(part)))
        for name, part in grads.items()
    }
    return norms | {
        "grad_norm": np.linalg.norm([*norms.values()], axis=0),
        "el2n": np.linalg.norm(softmax - is_label, axis=1),
        "loss": -np.sum(target * log_softmax, axis=1),
        "probability": softmax[rows, labels],
        "margin": logits[rows, labels] - np.max(np.where(is_label == 1, -np.inf, logits), axis=1),
        "entropy": -np.sum(softmax * log_softmax, axis=1),
    }
