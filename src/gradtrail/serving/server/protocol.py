"""Requests and answers: the open inference protocol (KServe's version 2, JSON), and MLflow's `/invocations`.

Images are read without a Python object per pixel: the lists of orjson become bytes or doubles in one call.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson
from jaxtyping import UInt8
from starlette.exceptions import HTTPException

from gradtrail.serving.server.batching import Images, Probabilities
from gradtrail.stages.model.exported import Manifest

INPUT, PROBABILITIES, LABEL = "images", "probabilities", "label"
_TYPES = ("UINT8", "FP32")
_MLFLOW_KEYS = ("inputs", "instances")
_SCALARS = (int, float, str, type(None))
_NUM_SHOWN = 10  # elements of an invalid list in an error
_NUM_OTHERS = 2000  # values of a request besides its images


@dataclass(frozen=True, kw_only=True)
class Inference:
    """A request of the open inference protocol."""

    images: Images
    id: str | None  # the client's id
    outputs: Sequence[str]  # names of the requested outputs


def read_inference(body: bytes | bytearray, shape: tuple[int, ...], max_images: int) -> Inference:
    """Read a request of the open inference protocol, with one tensor `images`: UINT8, or FP32 from 0 to 1.

    Raises:
        HTTPException: The body is no such request (400), or has too many images (413).
    """
    content = _object(body, shape, max_images)
    tensors = content.get("inputs")
    if not isinstance(tensors, list) or len(tensors) != 1 or not isinstance(tensors[0], dict):
        raise HTTPException(400, f'inputs: must be a list with one tensor named "{INPUT}"')
    outputs = content.get("outputs") or []
    names: list[Any] = [
        output.get("name") if isinstance(output, dict) else None for output in _list(outputs, "outputs")
    ]
    if any(name not in (PROBABILITIES, LABEL) for name in names):
        raise HTTPException(400, f"outputs: must name some of {PROBABILITIES}, {LABEL}")
    if not isinstance(content.get("id"), str | None):
        raise HTTPException(400, f"id: must be text, got {_short(content['id'])}")
    images = _tensor_images(tensors[0], shape, max_images)
    return Inference(images=images, id=content.get("id"), outputs=names or (PROBABILITIES, LABEL))


def _tensor_images(tensor: Mapping[str, Any], shape: tuple[int, ...], max_images: int) -> Images:
    if tensor.get("name") != INPUT:
        raise HTTPException(400, f'inputs[0].name: must be "{INPUT}", got {_short(tensor.get("name"))}')
    if (datatype := tensor.get("datatype")) not in _TYPES:
        raise HTTPException(400, f"inputs[0].datatype: must be one of {', '.join(_TYPES)}, got {_short(datatype)}")
    sides: Any = tensor.get("shape")
    are_whole = isinstance(sides, list) and all(type(side) is int for side in sides)
    if not (are_whole and sides[1:] == [*shape] and sides[0] >= 0):
        expected = ", ".join(map(str, shape))
        raise HTTPException(400, f"inputs[0].shape: must be [images, {expected}], got {_short(sides)}")
    _check_number(sides[0], max_images)
    data = _list(tensor.get("data"), "inputs[0].data")
    if data and isinstance(data[0], list):
        data = _flat(data, shape, "inputs[0].data: must be flat, or nested as its shape says")
    if len(data) != (number := math.prod(sides)):
        raise HTTPException(400, f"inputs[0].data: must have {number:,} values, as its shape says; got {len(data):,}")
    pixels = _whole_numbers(data) if datatype == "UINT8" else _shares(data)
    if pixels is None:
        raise HTTPException(400, "inputs[0].data: UINT8 values must be whole numbers from 0 to 255")
    return pixels.reshape(sides)


def read_invocation(body: bytes | bytearray, content_type: str, shape: tuple[int, ...], max_images: int) -> Images:
    """Read a request of MLflow's scoring server: `inputs` or `instances`, one image or a list of images.

    Whole numbers are pixels from 0 to 255; if one number has a fraction, all are from 0 to 1. Whole numbers that are
    all 0 or 1 are refused, as some languages write 1.0 as 1 in JSON.

    Raises:
        HTTPException: The body is no such request (400, 415), or has too many images (413).
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, f"Content-Type: must be application/json, got {_short(content_type)}")
    content = _object(body, shape, max_images)
    keys = [key for key in _MLFLOW_KEYS if key in content]
    if len(keys) != 1:
        raise HTTPException(400, f"expected one of the keys {', '.join(_MLFLOW_KEYS)}; got {_short([*content])}")
    message = f"{keys[0]}: must be a list of images, each {' lists of '.join(map(str, shape))} numbers"
    data = _list(content[keys[0]], keys[0])
    if _depth(data) == len(shape):
        data = [data]  # one image
    if not data:
        raise HTTPException(400, message)
    _check_number(len(data), max_images)
    flat = _flat(data, shape, message)
    pixels = _whole_numbers(flat)
    if pixels is not None and pixels.max() == 1:
        remedy = "send 0 and 255, or a tensor with a datatype to /v2/models/NAME/infer"
        raise HTTPException(400, f"{keys[0]}: whole numbers that are all 0 or 1 may be pixels or shares; {remedy}")
    return (pixels if pixels is not None else _shares(flat)).reshape(len(data), *shape)


def inference_answer(request: Inference, probabilities: Probabilities, about: Manifest, version: str) -> dict[str, Any]:
    """Return the answer to a request of the open inference protocol."""
    tensors = {PROBABILITIES: ("FP32", probabilities), LABEL: ("INT64", probabilities.argmax(axis=1))}
    outputs = [
        {"name": name, "datatype": datatype, "shape": values.shape, "data": np.ascontiguousarray(values).ravel()}
        for name, (datatype, values) in tensors.items()
        if name in request.outputs
    ]
    client_id = {} if request.id is None else {"id": request.id}
    return {"model_name": about.name, "model_version": version, **client_id, "outputs": outputs}


def invocation_answer(probabilities: Probabilities) -> dict[str, Any]:
    """Return the answer of `/invocations`."""
    labels = probabilities.argmax(axis=1)
    return {"predictions": {LABEL: labels, PROBABILITIES: np.ascontiguousarray(probabilities)}}


def metadata(about: Manifest, version: str) -> dict[str, Any]:
    """Return the metadata of a model for the open inference protocol."""
    return {
        "name": about.name,
        "versions": [version],
        "platform": "jax_stablehlo",
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, *about.image_shape]}],
        "outputs": [
            {"name": PROBABILITIES, "datatype": "FP32", "shape": [-1, len(about.classes)]},
            {"name": LABEL, "datatype": "INT64", "shape": [-1]},
        ],
        "parameters": {"classes": about.classes, "model": about.model, "dataset": about.dataset},
    }


def to_json(content: Mapping[str, Any]) -> bytes:
    """Return JSON; arrays become lists, float32 as the shortest text that reads back as the same number."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _object(body: bytes | bytearray, shape: tuple[int, ...], max_images: int) -> dict[str, Any]:
    _check_counts(body, shape, max_images)
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise HTTPException(400, f"expected a JSON object, got {_short(content)}")
    return content


def _check_counts(body: bytes | bytearray, shape: tuple[int, ...], max_images: int) -> None:
    """Refuse a body with more values than its images can have, before orjson takes seconds and much memory for them.

    Commas separate the numbers. Lists, objects and texts take the most memory; images are nested in at most so many.
    """
    num_numbers, pixels = body.count(b","), math.prod(shape)
    num_images = min(max_images, num_numbers // pixels + 1)
    num_lists = num_images * sum(math.prod(shape[:depth]) for depth in range(len(shape)))
    num_others = sum(map(body.count, (b"[", b"{", b'"')))
    if num_numbers > max_images * pixels + _NUM_OTHERS or num_others > num_lists + _NUM_OTHERS:
        most = f"{max_images:,} images of {' × '.join(map(str, shape))} numbers"
        counts = f"{num_numbers:,} commas and {num_others:,} brackets, braces and quotes"
        raise HTTPException(413, f"the body has {counts}; a request may have {most}")


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise HTTPException(400, f"{name}: must be a list, got {_short(value)}")
    return value


def _check_number(number: int, max_images: int) -> None:
    if number > max_images:
        raise HTTPException(413, f"{number:,} images; a request may have {max_images:,}")


def _depth(value: Any) -> int:
    """Return the number of lists around the first value."""
    depth = 0
    while isinstance(value, list):
        value, depth = value[0] if value else None, depth + 1
    return depth


def _flat(data: list[Any], shape: tuple[int, ...], message: str) -> list[Any]:
    """Return the values of images that are lists of lists; refuse other lengths."""
    try:
        for side in shape:
            if any(len(part) != side for part in data):
                raise HTTPException(400, message)
            data = list(chain.from_iterable(data))
    except TypeError:  # a number in place of a list
        raise HTTPException(400, message) from None
    return data


def _whole_numbers(values: list[Any]) -> UInt8[np.ndarray, " values"] | None:
    """Return pixels; None if a value is no pixel."""
    try:
        return np.frombuffer(bytes(values), np.uint8)
    except (TypeError, ValueError, OverflowError):
        return None


def _shares(values: list[Any]) -> UInt8[np.ndarray, " values"]:
    """Return pixels for values from 0 to 1."""
    message = "values must be whole numbers from 0 to 255, or numbers from 0 to 1"
    try:
        shares = np.frombuffer(array("d", values), np.float64)
    except (TypeError, OverflowError):
        raise HTTPException(400, message) from None
    if len(shares) and not (shares.min() >= 0 and shares.max() <= 1):  # NaN is neither
        raise HTTPException(400, f"{message}; got {shares.min():g} to {shares.max():g}")
    return np.rint(shares * 255).astype(np.uint8)


def _short(value: Any) -> str:
    """Return a value for an error, shortened; lists may be nested too deeply for `str`."""
    if isinstance(value, list) and all(isinstance(element, _SCALARS) for element in value[:_NUM_SHOWN]):
        return str(value[:_NUM_SHOWN])[:60]
    return repr(value)[:60] if isinstance(value, _SCALARS) else f"a {type(value).__name__}"
