"""Requests and answers: the open inference protocol (KServe's version 2, JSON), and MLflow's `/invocations`.

Images are read without a Python object per pixel: the lists of orjson become bytes or doubles in one call.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
import orjson
from jaxtyping import Float, UInt8

from gradtrail.serving.server.refusal import Refusal
from gradtrail.stages.artifacts.exported import Manifest

Images = UInt8[np.ndarray, "images height width"]
Probabilities = Float[np.ndarray, "images classes"]

INPUT, PROBABILITIES, LABEL = "images", "probabilities", "label"
_OUTPUTS = (PROBABILITIES, LABEL)
_TYPES = ("UINT8", "FP32")
_MLFLOW_KEYS = ("inputs", "instances")
_MAX_ID_CHARS = 128
_SCALARS = (int, float, str, type(None))
_NUM_SHOWN = 10  # elements of an invalid list in an error


@dataclass(frozen=True, kw_only=True)
class Inference:
    """A request of the open inference protocol."""

    images: Images
    id: str | None  # the client's id
    outputs: Sequence[str]  # names of the requested outputs


def read_inference(body: bytes, shape: tuple[int, int], max_images: int) -> Inference:
    """Read a request of the open inference protocol, with one tensor `images`: UINT8, or FP32 from 0 to 1.

    Args:
        body: JSON.
        shape: height and width of the model's images, in pixels.
        max_images: Limit of images per request.

    Raises:
        Refusal: The body is no such request (400), or has too many images (413).
    """
    content = _object(body)
    tensors = content.get("inputs")
    if not isinstance(tensors, list) or len(tensors) != 1 or not isinstance(tensors[0], dict):
        raise Refusal(400, f'inputs: must be a list with one tensor named "{INPUT}"')
    pixels = _tensor_pixels(tensors[0], shape, max_images)
    return Inference(images=pixels, id=_id(content.get("id")), outputs=_output_names(content))


def _tensor_pixels(tensor: Mapping[str, Any], shape: tuple[int, int], max_images: int) -> Images:
    if tensor.get("name") != INPUT:
        raise Refusal(400, f'inputs[0].name: must be "{INPUT}", got {_short(tensor.get("name"))}')
    if (datatype := tensor.get("datatype")) not in _TYPES:
        raise Refusal(400, f"inputs[0].datatype: must be one of {', '.join(_TYPES)}, got {_short(datatype)}")
    sides = tensor.get("shape")
    if not (_are_whole(sides) and tuple(sides[1:]) == shape and sides[0] >= 0):
        raise Refusal(400, f"inputs[0].shape: must be [images, {shape[0]}, {shape[1]}], got {_short(sides)}")
    _check_number(sides[0], max_images)
    flat = _flat(tensor.get("data"))
    if len(flat) != (expected := sides[0] * shape[0] * shape[1]):
        raise Refusal(400, f"inputs[0].data: must have {expected:,} values, as its shape says; got {len(flat):,}")
    pixels = _whole_numbers(flat) if datatype == "UINT8" else _shares(flat)
    if pixels is None:
        raise Refusal(400, "inputs[0].data: UINT8 values must be whole numbers from 0 to 255")
    return pixels.reshape(sides)


def _are_whole(sides: Any) -> TypeGuard[list[int]]:
    return isinstance(sides, list) and len(sides) == 3 and all(type(side) is int for side in sides)


def _flat(data: Any) -> list[Any]:
    """Return the values of a tensor as a flat list."""
    if not isinstance(data, list):
        raise Refusal(400, f"inputs[0].data: must be a list, got {_short(data)}")
    for _ in range(2):
        if data and isinstance(data[0], list):
            data = _joined(data)
    return data


def read_invocation(body: bytes, content_type: str, shape: tuple[int, int], max_images: int) -> Images:
    """Read a request of MLflow's scoring server: `inputs` or `instances`, one image or a list of images.

    Whole numbers are pixels from 0 to 255; if one number has a fraction, all are from 0 to 1. Whole numbers that are
    all 0 or 1 are refused, as some languages write 1.0 as 1 in JSON.

    Raises:
        Refusal: The body is no such request (400, 415), or has too many images (413).
    """
    _check_content_type(content_type)
    content = _object(body)
    keys = [key for key in _MLFLOW_KEYS if key in content]
    if len(keys) != 1:
        raise Refusal(400, f"expected one of the keys {', '.join(_MLFLOW_KEYS)}; got {_short([*content])}")
    height, width = shape
    message = f"{keys[0]}: must be a list of images, each {height} lists of {width} numbers"
    data = content[keys[0]]
    try:
        if len(data) == height and len(data[0]) == width and not isinstance(data[0][0], list):
            data = [data]  # one image
        if not isinstance(data, list) or not data or any(len(image) != height for image in data):
            raise Refusal(400, message)
        _check_number(len(data), max_images)
        rows = _joined(data)
        if any(len(row) != width for row in rows):
            raise Refusal(400, message)
        flat = _joined(rows)
    except (TypeError, LookupError):
        raise Refusal(400, message) from None
    pixels = _whole_numbers(flat)
    if pixels is not None and pixels.max() == 1:
        remedy = "send 0 and 255, or a tensor with a datatype to /v2/models/NAME/infer"
        raise Refusal(400, f"{keys[0]}: whole numbers that are all 0 or 1 may be pixels or shares; {remedy}")
    return (pixels if pixels is not None else _shares(flat)).reshape(len(data), height, width)


def inference_answer(request: Inference, probabilities: Probabilities, about: Manifest, version: str) -> bytes:
    """Return the answer to a request of the open inference protocol, as JSON."""
    labels = probabilities.argmax(axis=1)
    tensors = {
        PROBABILITIES: _tensor(PROBABILITIES, "FP32", probabilities),
        LABEL: _tensor(LABEL, "INT64", labels),
    }
    answer: dict[str, Any] = {"model_name": about.name, "model_version": version}
    if request.id is not None:
        answer["id"] = request.id
    return to_json(answer | {"outputs": [tensors[name] for name in request.outputs]})


def invocation_answer(probabilities: Probabilities) -> bytes:
    """Return the answer of `/invocations`, as JSON."""
    labels = probabilities.argmax(axis=1)
    return to_json({"predictions": {LABEL: labels, PROBABILITIES: np.ascontiguousarray(probabilities)}})


def metadata(about: Manifest, version: str) -> dict[str, Any]:
    """Return the metadata of a model for the open inference protocol."""
    height, width = about.image_shape
    return {
        "name": about.name,
        "versions": [version],
        "platform": "jax_stablehlo",
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, height, width]}],
        "outputs": [
            {"name": PROBABILITIES, "datatype": "FP32", "shape": [-1, len(about.classes)]},
            {"name": LABEL, "datatype": "INT64", "shape": [-1]},
        ],
        "parameters": {"classes": about.classes, "model": about.model, "dataset": about.dataset},
    }


def to_json(content: Mapping[str, Any]) -> bytes:
    """Return JSON; arrays become lists, float32 as the shortest text that reads back as the same number."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _object(body: bytes) -> dict[str, Any]:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"expected a JSON object, got {_short(content)}")
    return content


def _check_content_type(content_type: str) -> None:
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if kind != "application/json" or any(parameter != "charset=utf-8" for parameter in parameters):
        raise Refusal(415, f"Content-Type: must be application/json, got {_short(content_type)}")


def _check_number(number: int, max_images: int) -> None:
    if number > max_images:
        raise Refusal(413, f"{number:,} images; a request may have {max_images:,}")


def _output_names(content: Mapping[str, Any]) -> Sequence[str]:
    outputs = content.get("outputs")
    if not outputs:
        return _OUTPUTS
    dicts = [output for output in outputs if isinstance(output, dict)] if isinstance(outputs, list) else []
    names = [output["name"] for output in dicts if isinstance(output.get("name"), str)]
    if not names or len(names) > len(_OUTPUTS) or not {*names} <= {*_OUTPUTS}:
        raise Refusal(400, f"outputs: must name some of {', '.join(_OUTPUTS)}")
    return names


def _id(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and len(value) <= _MAX_ID_CHARS):
        raise Refusal(400, f"id: must be text of at most {_MAX_ID_CHARS} characters")
    return value


def _joined(lists: Sequence[Any]) -> list[Any]:
    """Return the concatenated elements of lists."""
    try:
        return list(chain.from_iterable(lists))
    except TypeError:
        raise Refusal(400, "lists must be nested equally deep everywhere") from None


def _whole_numbers(values: list[Any]) -> UInt8[np.ndarray, " values"] | None:
    """Return pixels; None if a value is no pixel."""
    try:
        return np.frombuffer(bytes(values), np.uint8)
    except (TypeError, ValueError, OverflowError):
        return None


def _shares(values: list[Any]) -> UInt8[np.ndarray, " values"]:
    """Return pixels for values from 0 to 1."""
    try:
        shares = np.frombuffer(array("d", values), np.float64)
    except (TypeError, OverflowError):
        raise Refusal(400, "values must be whole numbers from 0 to 255, or numbers from 0 to 1") from None
    if len(shares) and not (shares.min() >= 0 and shares.max() <= 1):  # NaN is neither
        observed = f"{shares.min():g} to {shares.max():g}"
        raise Refusal(400, f"values must be whole numbers from 0 to 255, or numbers from 0 to 1; got {observed}")
    return np.rint(shares * 255).astype(np.uint8)


def _tensor(name: str, datatype: str, values: np.ndarray) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": values.shape, "data": np.ascontiguousarray(values).ravel()}


def _short(value: Any) -> str:
    """Return a value for an error, shortened; lists may be nested too deeply for `str`."""
    if isinstance(value, list) and all(isinstance(element, _SCALARS) for element in value[:_NUM_SHOWN]):
        return str(value[:_NUM_SHOWN])[:60]
    return repr(value)[:60] if isinstance(value, _SCALARS) else f"a {type(value).__name__}"
