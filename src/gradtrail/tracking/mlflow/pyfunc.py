"""A trained network as MLflow serves it: `mlflow.pyfunc.load_model` and `mlflow models predict` import this module.

A logged model contains this module, those that it imports, and a weights file, or a folder with that of each member of
an ensemble: it needs no repository and no pickle.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, UInt8
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from gradtrail.core.evaluate.calibration import pooled
from gradtrail.core.nn.models import Model, Params
from gradtrail.stages.artifacts.weights import read_weights

_LARGEST_BATCH = 256
Images = UInt8[np.ndarray, "images height width"] | Float[np.ndarray, "images height width"]


class ServedModel:
    """A network that takes images and returns labels, or an ensemble of several, whose mean probabilities count.

    Args:
        model: the network.
        members: its parameters, as arrays on the host, or those of each member.
    """

    def __init__(self, model: Model, members: Sequence[Params]):
        self._shape = model.config.image_shape
        self._num_classes = model.config.num_classes
        self._members = jax.device_put([*members])
        self._probabilities = jax.jit(lambda params, images: jax.nn.softmax(model.apply(params, images)))

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> dict[str, np.ndarray]:  # noqa: ARG002 - MLflow's
        """Classify images, however many.

        Args:
            data: array of shape (images, height, width), or (height, width) for one image: whole numbers from 0 to 255,
                or floats from 0 to 1, with bright ink on a background of 0. Nested lists, as from JSON, are accepted.
            params: MLflow's inference parameters; there are none.

        Returns:
            `label` (images), int64, and `probabilities` (images, classes), float32.

        Raises:
            MlflowException: another shape, type or range; one line.
        """
        images = as_images(data, self._shape)
        starts = range(0, len(images), _LARGEST_BATCH)
        parts = [self._batch(images[start : start + _LARGEST_BATCH]) for start in starts]
        probabilities = np.concatenate([np.zeros((0, self._num_classes), np.float32), *parts])
        return {"label": probabilities.argmax(axis=1), "probabilities": probabilities}

    def _batch(self, images: Images) -> Float[np.ndarray, "images classes"]:
        """Return the probabilities; padding to a power of two keeps the number of compiled sizes small."""
        size = 1 << (len(images) - 1).bit_length()
        padded = np.concatenate([images, np.zeros((size - len(images), *self._shape), images.dtype)])
        of_each = (np.asarray(self._probabilities(params, padded)) for params in self._members)
        return pooled(of_each)[: len(images)]


def as_images(data: Any, shape: tuple[int, int]) -> Images:
    """Return images as the network takes them: uint8 pixels, or float32 in 0..1; a single image as a batch of one.

    Raises:
        MlflowException: another shape, type or range; one line.
    """
    try:
        is_nested = isinstance(data, np.ndarray) and data.dtype.kind == "O"
        images = np.asarray(data.tolist() if is_nested else data)
    except ValueError:
        raise _refusal("rows or images of different lengths", shape) from None
    if images.shape == shape:
        images = images[None]
    if images.ndim != 3 or images.shape[1:] != shape:
        raise _refusal(f"shape {images.shape}", shape)
    if images.dtype.kind not in "uif":
        raise _refusal(f"values of type {images.dtype}", shape)
    is_float = images.dtype.kind == "f"
    low, high = (images.min(), images.max()) if images.size else (0, 0)
    if not (low >= 0 and high <= (1 if is_float else 255)):  # NaN is neither
        raise _refusal(f"{images.dtype} from {low:g} to {high:g}", shape)
    return images.astype(np.float32 if is_float else np.uint8)


def _refusal(found: str, shape: tuple[int, int]) -> MlflowException:
    wanted = f"an array (images, {shape[0]}, {shape[1]}) of whole numbers from 0 to 255, or of floats from 0 to 1"
    return MlflowException(f"images: {wanted}, is needed; got {found}", error_code=INVALID_PARAMETER_VALUE)


def _load_pyfunc(path: str) -> ServedModel:
    """Load the model from its weights file, or from a folder of several: what MLflow calls."""
    files = sorted(Path(path).iterdir()) if Path(path).is_dir() else [Path(path)]
    networks = [read_weights(file) for file in files]
    return ServedModel(networks[0][0], [params for _, params, _ in networks])
