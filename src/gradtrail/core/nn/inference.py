"""Predictions of a model: logits, loss and correctness of each example."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

from gradtrail.core.data import Split
from gradtrail.core.nn import losses
from gradtrail.core.nn.models import HostParams, Model, Params
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.core.xla.passes import Pass, compile_within

VALIDATION_BATCH_SIZE = 1000  # largest batch


def predict_batch(
    model: Model, params: Params, images: UInt8[Array, "batch height width *channels"], labels: Int[Array, " batch"]
) -> dict[str, Array]:
    """Return `logits` (batch, classes), `loss` in nats without label smoothing, and `correct`, 0 or 1; float32."""
    logits = model.apply(params, images)
    return {
        "logits": logits,
        "loss": losses.cross_entropy(logits, labels),
        "correct": losses.correct(logits, labels).astype(logits.dtype),
    }


def abstract_batch(model: Model, count: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the images and labels of `count` examples."""
    images = jax.ShapeDtypeStruct((count, *model.config.image_shape), jnp.uint8)
    return images, jax.ShapeDtypeStruct((count,), jnp.int32)


def compile_predict(model: Model, batch_size: int, *, compiler: Compiler) -> CompiledFunction:
    """Compile `predict_batch` for one batch size: params, images, labels → rows."""
    function = functools.partial(predict_batch, model)
    return compiler.compile("predict", function, model.abstract_params(), *abstract_batch(model, batch_size))


def compile_predict_within(model: Model, largest: int = VALIDATION_BATCH_SIZE, *, compiler: Compiler) -> Pass:
    """Compile `predict_batch` for a batch size that is at most `largest` and within the budget of memory."""
    return compile_within(largest, lambda size: compile_predict(model, size, compiler=compiler))


def validate(predict: Pass, params: Params | HostParams, split: Split) -> dict[str, float]:
    """Return mean `loss` and `accuracy` over a split."""
    return mean_scores(predict(params, split.images, split.labels))


def mean_scores(rows: Mapping[str, Array | np.ndarray]) -> dict[str, float]:
    """Return mean `loss` and `accuracy` of rows of examples, added on the host in float64."""
    loss, accuracy = (float(np.mean(np.asarray(rows[name]), dtype=np.float64)) for name in ("loss", "correct"))
    return {"loss": loss, "accuracy": accuracy}
