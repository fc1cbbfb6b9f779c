"""Predictions of a model: logits, loss and correctness of each example."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

from gradtrail.core import batching
from gradtrail.core.data import Split
from gradtrail.core.nn import losses
from gradtrail.core.nn.models import HostParams, Model, Params
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

VALIDATION_BATCH_SIZE = 1000


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


def compile_predict(model: Model, batch_size: int, *, compiler: Compiler) -> CompiledFunction:
    """Compile `predict_batch` for one batch size: params, images, labels → rows."""
    images = jax.ShapeDtypeStruct((batch_size, *model.config.image_shape), jnp.uint8)
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    function = functools.partial(predict_batch, model)
    return compiler.compile("predict", function, model.abstract_params(), images, labels)


def predict_logits(predict: Callable[..., dict[str, Array]], batch_size: int, split: Split) -> np.ndarray:
    """Return the logits of a split, (examples, classes) float32; `predict` takes `batch_size` examples."""
    return batching.join(batching.map_batches(predict, batch_size, split.images, split.labels))["logits"]


def validate(
    predict: Callable[..., dict[str, Array]],
    params: Params | HostParams,
    images: UInt8[np.ndarray, "examples height width *channels"],
    labels: Int[np.ndarray, " examples"],
) -> dict[str, float]:
    """Return mean `loss` and `accuracy` over a split; `predict` is compiled for `VALIDATION_BATCH_SIZE` rows."""
    call = functools.partial(predict, params)
    rows = batching.join(batching.map_batches(call, VALIDATION_BATCH_SIZE, images, labels))
    loss, accuracy = (float(np.mean(rows[name], dtype=np.float64)) for name in ("loss", "correct"))
    return {"loss": loss, "accuracy": accuracy}
