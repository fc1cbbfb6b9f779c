"""Scores of a sample of examples in float64, by their definitions, and the errors of the passes' scores.

Gradients are computed one after the other by `jax.grad` of the loss, with float64 weights and operations: nothing is
shared with the fast passes. JAX's float64 is switched on for these calls alone, in their thread.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from gradtrail.core.data import Split
from gradtrail.core.gradients.scores import LAYER
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.losses import Loss
from gradtrail.core.nn.models import HostParams, Model, Params
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

NUM_EXAMPLES = 200
ERROR = "float64_error/"  # prefix of an error among metrics
LIMITS: Mapping[Precision, float] = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}  # larger errors cause a warning
_BY_LAYER = "grad_norm_by_layer"  # the largest error of all layers


def sample_size(splits: Mapping[str, Split]) -> int:
    """Return the number of examples that are computed in float64."""
    return min(NUM_EXAMPLES, sum(map(len, splits.values())))


def compile_exact(model: Model, loss: Loss, num_examples: int, *, compiler: Compiler) -> CompiledFunction:
    """Compile the float64 gradients: params, images in 0..1, labels → `loss`, `logits`, and squared norms by layer."""
    exact = Model(dataclasses.replace(model.config, precision="float32"))  # rounds no operand

    def example_loss(params: Params, image: Array, label: Array) -> tuple[Array, tuple[Array, Array]]:
        logits = exact.apply(params, image[None])
        value = loss.per_example(logits, label[None])[0]
        return value, (value, logits[0])

    def score(params: Params, images: Array, labels: Array) -> dict[str, Array]:
        def score_example(example: tuple[Array, Array]) -> dict[str, Array]:
            grads, (value, logits) = jax.grad(example_loss, has_aux=True)(params, *example)
            layers = exact.split_by_layer(grads)
            squares = {name: jax.tree.map(lambda leaf: jnp.sum(leaf**2), part) for name, part in layers.items()}
            norms = {name: sum(jax.tree.leaves(leaves)) for name, leaves in squares.items()}
            return {"loss": value, "logits": logits, **norms}

        return jax.lax.map(score_example, (images, labels))  # `vmap` would need the memory of many gradients

    shapes = model.abstract_params()
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float64), shapes)
        images = jax.ShapeDtypeStruct((num_examples, *model.config.image_shape), jnp.float64)
        labels = jax.ShapeDtypeStruct((num_examples,), jnp.int32)
        return compiler.compile("exact_score", score, params, images, labels)


def exact_scores(
    function: CompiledFunction,
    params: Params | HostParams,
    images: UInt8[np.ndarray, "examples height width *channels"],
    labels: Int[np.ndarray, " examples"],
) -> dict[str, Float[np.ndarray, " examples"]]:
    """Return the scores, float64, named as by `scores.score_batch`, of as many examples as `function` takes."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    with jax.enable_x64(True):
        results = {name: np.asarray(rows) for name, rows in function(wide, images / 255.0, labels).items()}
    logits, loss = results.pop("logits"), results.pop("loss")
    by_layer = {f"{LAYER}{name}": np.sqrt(squares) for name, squares in results.items()}
    norm = np.sqrt(np.sum(list(results.values()), axis=0))
    return {"grad_norm": norm, "loss": loss, **by_layer, **_logit_scores(logits, labels)}


def float64_errors(
    function: CompiledFunction,
    params: Params | HostParams,
    splits: Mapping[str, Split],
    scores: Mapping[str, Mapping[str, np.ndarray]],
) -> dict[str, float]:
    """Return the largest error of each score on a sample, evenly spaced, as metrics, rounded to two digits.

    Other examples may have larger errors. The error of an example is relative to its float64 score, or to the root mean
    square of that score over the sample if that is larger: a score near zero has few correct digits in any precision,
    and matters little. `function` is compiled for `sample_size` examples; `scores` is split → score → values.
    """
    count = sample_size(splits)
    rows = np.linspace(0, sum(map(len, splits.values())) - 1, count).round().astype(np.int64)
    images, labels = (
        np.concatenate([getattr(split, name) for split in splits.values()])[rows] for name in ("images", "labels")
    )
    errors: dict[str, float] = {}
    for key, wide in exact_scores(function, params, images, labels).items():
        values = np.concatenate([scores[name][key] for name in splits])[rows]
        scale = np.maximum(np.abs(wide), np.sqrt(np.mean(wide**2)))
        error = float(np.max(np.abs(values - wide) / np.maximum(scale, np.finfo(np.float64).tiny)))
        name = ERROR + (_BY_LAYER if key.startswith(LAYER) else key)
        errors[name] = max(errors.get(name, 0.0), float(f"{error:.2g}"))
    return errors


def _logit_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the scores that follow from the logits, by their definitions."""
    rows = np.arange(len(logits))
    highest = logits.max(axis=1, keepdims=True)
    log_softmax = logits - highest - np.log(np.sum(np.exp(logits - highest), axis=1, keepdims=True))
    softmax, is_label = np.exp(log_softmax), np.eye(logits.shape[1])[labels]
    return {
        "el2n": np.sqrt(np.sum((softmax - is_label) ** 2, axis=1)),
        "probability": softmax[rows, labels],
        "margin": logits[rows, labels] - np.max(np.where(is_label == 1, -np.inf, logits), axis=1),
        "entropy": -np.sum(softmax * log_softmax, axis=1),
    }
