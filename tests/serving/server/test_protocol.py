"""Requests and answers of the two protocols, compared with numpy."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from gradtrail.serving.server import protocol

SHAPE, COLOR = (3, 2), (3, 2, 3)
SIX = [0] * 6
DEEP = b"[" * 1010 + b"]" * 1010  # orjson reads it, and `str` would exceed the recursion limit


def inference(data: Any, shape: Any, datatype: str = "UINT8", **more: Any) -> bytes:
    """Return a request; a text DEEP in it stands for nested lists."""
    tensor = {"name": "images", "shape": shape, "datatype": datatype, "data": data}
    return json.dumps({"inputs": [tensor], **more}).encode().replace(b'"DEEP"', DEEP)


def invoke(content: Any, content_type: str = "application/json", shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return protocol.read_invocation(body, content_type, shape, 100)


def infer(body: bytes, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return protocol.read_inference(body, shape, 4).images


def check_refused(read: Callable[..., object], *sent: Any, status: int = 400, message: str, **options: Any) -> None:
    with pytest.raises(HTTPException) as refused:
        read(*sent, **options)
    assert refused.value.status_code == status
    assert message in refused.value.detail
    assert "\n" not in refused.value.detail


@given(st.integers(0, 4), st.randoms(use_true_random=False), st.booleans(), st.sampled_from([SHAPE, COLOR]))
def test_pixels_arrive_unchanged_flat_or_nested(count: int, random: Any, is_flat: bool, shape: tuple[int, ...]) -> None:
    pixels = [random.randrange(256) for _ in range(math.prod(shape) * count)]
    images = np.array(pixels, np.uint8).reshape(count, *shape)
    data = (images.ravel() if is_flat else images).tolist()
    result = infer(inference(data, images.shape), shape)
    np.testing.assert_array_equal(result, images)
    assert result.dtype == np.uint8
    if images.size and images.max() > 1:
        np.testing.assert_array_equal(invoke({"instances": images.tolist()}, shape=shape), images)
    if images.size and images[0].max() > 1:
        np.testing.assert_array_equal(invoke({"inputs": images[0].tolist()}, shape=shape), images[:1])


def test_error_names_the_shape_of_color_images() -> None:
    message = "inputs[0].shape: must be [images, 3, 2, 3], got [1, 3, 2]"
    check_refused(infer, inference(SIX, [1, 3, 2]), COLOR, message=message)
    for images in ([[[0, 255]] * 2] * 3, [[0, 255]] * 3, [[[[0, 255]] * 2] * 3]):  # no list of three channels
        message = "inputs: must be a list of images, each 3 lists of 2 lists of 3 numbers"
        check_refused(invoke, {"inputs": images}, shape=COLOR, message=message)


def test_values_from_0_to_1_and_binary_images_become_pixels_if_their_form_is_clear() -> None:
    pixels = np.arange(256, dtype=np.uint8)[:252].reshape(-1, *SHAPE)
    shares = pixels / 255
    request = protocol.read_inference(inference(shares.ravel().tolist(), shares.shape, "FP32"), SHAPE, 100)
    np.testing.assert_array_equal(request.images, pixels)
    np.testing.assert_array_equal(invoke({"inputs": shares.tolist()}), pixels)
    for text, pixels in (("0", 0), ("1.0", 255), ("255", 255)):
        images = invoke(f'{{"inputs": [[0, {text}], [0, 0], [0, 0]]}}'.encode())
        assert images.tolist() == [[[0, pixels], [0, 0], [0, 0]]]
    image = [[1, 2], [3, 4], [5, 6]]
    assert invoke({"inputs": image}, "application/json; charset=UTF-8").tolist() == [image]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not readable as JSON"),
        (b"[" * 1500, "not readable as JSON"),
        (b"[1]", "expected a JSON object"),
        (b"{}", "inputs: must be a list with one tensor"),
        (b'{"inputs": [{"name": {"a": ' + DEEP + b"}}]}", 'inputs[0].name: must be "images", got a dict'),
        (inference(SIX, [1, 2, 3]), "inputs[0].shape: must be [images, 3, 2]"),
        (inference(SIX, [-1, 3, 2]), "inputs[0].shape: must be"),
        (inference(SIX, [True, 3, 2]), "inputs[0].shape: must be"),
        (inference(SIX, 7), "inputs[0].shape: must be"),
        (inference(SIX, [1, 3.0, 2.0]), "inputs[0].shape: must be [images, 3, 2], got [1, 3.0, 2.0]"),
        (inference(SIX, "DEEP"), "inputs[0].shape: must be [images, 3, 2], got a list"),
        (inference(SIX, [1, 3, 2], "DEEP"), "inputs[0].datatype: must be one of UINT8, FP32, got a list"),
        (inference(SIX, [1, 3, 2], "BYTES"), "inputs[0].datatype: must be one of UINT8, FP32"),
        (inference(SIX, [1, 3, 2], outputs=[{"name": "DEEP"}]), "outputs: must name some of"),
        (inference(SIX, [1, 3, 2], outputs=7), "outputs: must be a list, got 7"),
        (inference(SIX, [1, 3, 2], id=["a"]), "id: must be text"),
        (inference([0] * 5, [1, 3, 2]), "must have 6 values, as its shape says; got 5"),
        (inference([0] * 5 + [256], [1, 3, 2]), "UINT8 values must be whole numbers from 0 to 255"),
        (inference([0] * 5 + [0.5], [1, 3, 2]), "UINT8 values must be"),
        (inference([0] * 5 + ["7"], [1, 3, 2]), "UINT8 values must be"),
        (inference([[0], 1, 2, 3, 4, 5], [1, 3, 2]), "inputs[0].data: must be flat, or nested as its shape says"),
        (inference("text", [1, 3, 2]), "inputs[0].data: must be a list"),
        (inference([[0, 0, 0], [0, 0, 0]], [1, 3, 2]), "inputs[0].data: must be flat, or nested as its shape says"),
        (inference([0] * 5 + [1.01], [1, 3, 2], "FP32"), "got 0 to 1.01"),
        (inference([0] * 5 + ["1"], [1, 3, 2], "FP32"), "values must be whole numbers"),
    ],
)
def test_invalid_inference_is_refused_in_one_line(body: bytes, message: str) -> None:
    check_refused(infer, body, message=message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"inputs": [], "instances": []}, "expected one of the keys inputs, instances; got ['inputs', 'instances']"),
        ({"dataframe_split": {}}, "expected one of the keys"),
        ({"inputs": []}, "inputs: must be a list of images"),
        ({"inputs": 3}, "inputs: must be a list, got 3"),
        ({"inputs": {"images": []}}, "inputs: must be a list, got a dict"),
        ({"inputs": [[[1, 2], [3, 4], [5]]]}, "must be a list of images"),
        ({"inputs": [[[1, 2], [3, 4], "ab"]]}, "values must be whole numbers"),
        ({"inputs": [[[1, 2], [3, 4], [5, None]]]}, "values must be whole numbers"),
        ({"inputs": [[[0, 1], [1, 0], [256, 0]]]}, "got 0 to 256"),
        ({"inputs": [[[0, 1], [1, 0], [2**70, 0]]]}, "values must be whole numbers"),
        ({"inputs": [[[0, 1], [1, 0], [0, 0]]]}, "inputs: whole numbers that are all 0 or 1 may be pixels or shares"),
        ({"instances": [[True, False]] * 3}, "instances: whole numbers that are all 0 or 1 may be pixels or shares"),
    ],
)
def test_invalid_invocation_is_refused_in_one_line(content: Any, message: str) -> None:
    check_refused(invoke, content, message=message)


@pytest.mark.parametrize("content_type", ["", "text/csv", "text/plain; charset=utf-8"])
def test_other_content_types_are_refused(content_type: str) -> None:
    check_refused(invoke, {"inputs": []}, content_type, status=415, message="must be application/json")


@pytest.mark.parametrize("value", ["[],", "{},", '{"":0},', '"a",', "[0],", "0.1,"])
@pytest.mark.parametrize("shape", [(28, 28), (224, 224, 3)])
def test_values_that_images_cannot_have_are_refused_before_they_are_parsed(
    value: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol.orjson, "loads", lambda _: pytest.fail("parsed"))
    count = 2_000_000 if value == "0.1," else 100_000
    body = f'{{"inputs": [{(count * value)[:-1]}]}}'.encode()
    message = f"a request may have 10 images of {' × '.join(map(str, shape))}"
    check_refused(protocol.read_inference, body, shape, 10, status=413, message=message)
    check_refused(protocol.read_invocation, body, "application/json", shape, 10, status=413, message=message)


@pytest.mark.parametrize("shape", [(1, 1), (9, 7), (9, 7, 3), (9, 1, 3), (1, 9, 1)])
def test_as_many_nested_images_as_a_request_may_have_are_read(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_NUM_OTHERS", 30)
    images = np.full((50, *shape), 2, np.uint8)
    body = json.dumps({"inputs": images.tolist()}).encode()
    np.testing.assert_array_equal(protocol.read_invocation(body, "application/json", shape, 50), images)
    np.testing.assert_array_equal(
        protocol.read_inference(inference(images.tolist(), images.shape), shape, 50).images, images
    )


def test_too_many_images_are_refused() -> None:
    check_refused(infer, inference([0] * 30, [5, 3, 2]), status=413, message="5 images; a request may have 4")
    many = np.zeros((101, *SHAPE), int).tolist()
    check_refused(invoke, {"inputs": many}, status=413, message="101 images; a request may have 100")
