"""An exported model as MLflow serves it: `mlflow.pyfunc.load_model` and `mlflow models predict` import this module.

A logged model contains this module, those that it imports, and the export: it needs no repository, no Flax, no pickle.
"""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from gradtrail.stages.model.exported import ExportedModel, read_export
from gradtrail.support.errors import UserError


class ServedModel:
    """An exported model that takes images in any form and returns labels."""

    def __init__(self, exported: ExportedModel):
        self._exported = exported

    def predict(
        self,
        data: Any,
        params: dict[str, Any] | None = None,  # noqa: ARG002 - of MLflow; there are none
    ) -> dict[str, np.ndarray]:
        """Return `label` (images), int64, and the calibrated `probabilities` (images, classes), float32.

        Args:
            data: Array or nested lists of shape (images, height, width), or (height, width) for one image, in color
                with a last axis of channels: integers from 0 to 255, or floats from 0 to 1, which are rounded to 1/255.
                Grayscale is bright ink on a background of 0. Integers that are all 0 or 1 are refused, as they may be
                either.
        """
        images = _as_images(data, self._exported.manifest.image_shape)
        try:
            probabilities = self._exported.predict(images)
        except UserError as error:
            raise MlflowException(str(error)) from None
        return {"label": probabilities.argmax(axis=1), "probabilities": probabilities}


def _as_images(data: Any, shape: tuple[int, ...]) -> UInt8[np.ndarray, "images height width *channels"]:
    """Return uint8 pixels, as the program takes them; a single image as a batch of one."""
    try:
        is_nested = isinstance(data, np.ndarray) and data.dtype.kind == "O"
        images = np.asarray(data.tolist() if is_nested else data)
    except ValueError:
        raise _refusal("rows or images of different lengths", shape) from None
    if images.shape == shape:
        images = images[None]
    if images.shape[1:] != shape:
        raise _refusal(f"shape {images.shape}", shape)
    if images.dtype.kind not in "uif":
        raise _refusal(f"values of type {images.dtype}", shape)
    is_float = images.dtype.kind == "f"
    low, high = (images.min(), images.max()) if images.size else (0, 0)
    if not (low >= 0 and high <= (1 if is_float else 255)):  # NaN is neither
        raise _refusal(f"{images.dtype} from {low:g} to {high:g}", shape)
    if high == 1 and not is_float:
        raise _refusal(f"{images.dtype} that are all 0 or 1, which may be either", shape)
    return (np.rint(images * 255.0) if is_float else images).astype(np.uint8)


def _refusal(actual: str, shape: tuple[int, ...]) -> MlflowException:
    needed = f"an array (images, {', '.join(map(str, shape))}) of whole numbers from 0 to 255, or of floats from 0 to 1"
    return MlflowException(f"images: {needed}, is needed; got {actual}", error_code=INVALID_PARAMETER_VALUE)


def _load_pyfunc(path: str) -> ServedModel:
    """Load the model from the folder of its export; MLflow calls this."""
    try:
        return ServedModel(read_export(Path(path)))
    except UserError as error:
        raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from None
