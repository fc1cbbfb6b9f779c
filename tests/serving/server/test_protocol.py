"""What clients send and get: compared with numpy and with what MLflow's model makes of the same."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.serving.server import protocol
from gradtrail.serving.server.refusal import Refusal

SHAPE = (3, 2)
DEEP = b"[" * 1010 + b"]" * 1010  # read by orjson, and nested too deeply for `str`


def inference(data: Any, shape: Any, datatype: str = "UINT8", **more: Any) -> bytes:
    tensor = {"name": "images", "shape": shape, "datatype": datatype, "data": data}
    return json.dumps({"inputs": [tensor], **more}).encode()


def with_deep(body: bytes) -> bytes:
    """Put nested lists where `body` has the text DEEP."""
    return body.replace(b'"DEEP"', DEEP)


@given(st.integers(0, 4), st.randoms(use_true_random=False), st.booleans())
def test_pixels_arrive_as_they_were_sent_flat_or_nested(count: int, random: Any, is_flat: bool) -> None:
    images = np.array([random.randrange(256) for _ in range(6 * count)], np.uint8).reshape(count, *SHAPE)
    data = (images.ravel() if is_flat else images).tolist()
    found = protocol.read_inference(inference(data, images.shape), SHAPE, 4)
    np.testing.assert_array_equal(found.images, images)
    assert found.images.dtype == np.uint8
    if count:
        body = json.dumps({"instances": images.tolist()}).encode()
        np.testing.assert_array_equal(protocol.read_invocation(body, "application/json", SHAPE, 4), images)


def test_values_of_0_to_1_become_the_nearest_pixels() -> None:
    pixels = np.arange(256, dtype=np.uint8)[:252].reshape(-1, *SHAPE)
    shares = pixels / 255
    found = protocol.read_inference(inference(shares.ravel().tolist(), shares.shape, "FP32"), SHAPE, 100)
    np.testing.assert_array_equal(found.images, pixels)
    body = json.dumps({"inputs": shares.tolist()}).encode()
    np.testing.assert_array_equal(protocol.read_invocation(body, "application/json", SHAPE, 100), pixels)


def test_binary_images_are_taken_if_their_form_is_clear() -> None:
    for text, pixels in (("0", 0), ("1.0", 255), ("255", 255)):
        body = f'{{"inputs": [[0, {text}], [0, 0], [0, 0]]}}'.encode()
        images = protocol.read_invocation(body, "application/json", SHAPE, 1)
        assert images.tolist() == [[[0, pixels], [0, 0], [0, 0]]]


def test_one_image_without_a_list_around_it_is_taken_as_mlflow_takes_it() -> None:
    body = json.dumps({"inputs": [[1, 2], [3, 4], [5, 6]]}).encode()
    assert protocol.read_invocation(body, "application/json; charset=UTF-8", SHAPE, 1).tolist() == [
        [[1, 2], [3, 4], [5, 6]]
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"[1]", "expected a JSON object"),
        (b"{}", "inputs: must be a list with one tensor"),
        (inference([0] * 6, [1, 2, 3]), "inputs[0].shape: must be [images, 3, 2]"),
        (inference([0] * 6, [-1, 3, 2]), "inputs[0].shape: must be"),
        (inference([0] * 6, [True, 3, 2]), "inputs[0].shape: must be"),
        (inference([0] * 6, 7), "inputs[0].shape: must be"),
        (inference([0] * 6, []), "inputs[0].shape: must be [images, 3, 2], got []"),
        (inference([0] * 6, [1]), "inputs[0].shape: must be [images, 3, 2], got [1]"),
        (inference([0] * 6, [1, 3.0, 2.0]), "inputs[0].shape: must be [images, 3, 2], got [1, 3.0, 2.0]"),
        (inference([0] * 6, [1.0, 3, 2]), "inputs[0].shape: must be"),
        (with_deep(inference([0] * 6, "DEEP")), "inputs[0].shape: must be [images, 3, 2], got a list"),
        (
            inference([0] * 6, [1, 3, 2], "DEEP").replace(b'"DEEP"', DEEP),
            "inputs[0].datatype: must be one of UINT8, FP32, got a list",
        ),
        (inference([0] * 6, [1, 3, 2], 10**300), "inputs[0].datatype: must be"),
        (b'{"inputs": [{"name": {"a": ' + DEEP + b"}}]}", 'inputs[0].name: must be "images", got a dict'),
        (
            with_deep(inference([0] * 6, [1, 3, 2], outputs=[{"name": "DEEP"}])),
            "outputs: must name some of",
        ),
        (inference([0] * 6, [1, 3, 2], outputs=[{"name": None}]), "outputs: must name some of"),
        (inference([0] * 5, [1, 3, 2]), "must have 6 values, as its shape says; got 5"),
        (inference([0] * 5 + [256], [1, 3, 2]), "UINT8 values must be whole numbers from 0 to 255"),
        (inference([0] * 5 + [-1], [1, 3, 2]), "UINT8 values must be"),
        (inference([0] * 5 + [0.5], [1, 3, 2]), "UINT8 values must be"),
        (inference([0] * 5 + ["7"], [1, 3, 2]), "UINT8 values must be"),
        (inference([0] * 5 + [[]], [1, 3, 2]), "UINT8 values must be"),
        (inference([[0], 1, 2, 3, 4, 5], [1, 3, 2]), "lists must be nested equally deep"),
        (inference(6, [1, 3, 2]), "inputs[0].data: must be a list"),
        (inference("text", [1, 3, 2]), "inputs[0].data: must be a list"),
        (inference([0] * 5 + [1.01], [1, 3, 2], "FP32"), "got 0 to 1.01"),
        (inference([0] * 5 + ["1"], [1, 3, 2], "FP32"), "values must be whole numbers"),
        (inference([0] * 6, [1, 3, 2], "BYTES"), "inputs[0].datatype: must be one of UINT8, FP32"),
        (inference([0] * 6, [1, 3, 2], id=["a"]), "id: must be text"),
        (inference([0] * 6, [1, 3, 2], outputs=[{"name": "loss"}]), "outputs: must name some of"),
        (inference([0] * 6, [1, 3, 2], outputs=7), "outputs: must name some of"),
    ],
)
def test_what_is_no_request_is_refused_in_one_line(body: bytes, said: str) -> None:
    with pytest.raises(Refusal) as refused:
        protocol.read_inference(body, SHAPE, 4)
    assert refused.value.status == 400
    assert said in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "expected one of the keys inputs, instances"),
        ({"inputs": [], "instances": []}, "expected one of the keys inputs, instances; got ['inputs', 'instances']"),
        ({"dataframe_split": {}}, "expected one of the keys"),
        ({"inputs": []}, "inputs: must be a list of images"),
        ({"inputs": 3}, "must be a list of images"),
        ({"inputs": {"images": []}}, "must be a list of images"),
        ({"inputs": "abc"}, "must be a list of images"),
        ({"inputs": [[1, 2], [3, 4]]}, "must be a list of images"),
        ({"inputs": [[[1, 2], [3, 4], [5]]]}, "must be a list of images"),
        ({"inputs": [[[1, 2], [3, 4], "ab"]]}, "values must be whole numbers"),
        ({"inputs": [[[1, 2], [3, 4], {"a": 1, "b": 2}]]}, "values must be whole numbers"),
        ({"inputs": [[[1, 2], [3, 4], [5, None]]]}, "values must be whole numbers"),
        ({"inputs": [[[0, 1], [1, 0], [256, 0]]]}, "got 0 to 256"),
        ({"inputs": [[[0, 1], [1, 0], [2**70, 0]]]}, "values must be whole numbers"),
        ({"inputs": [[[0, 1], [1, 0], [0, 0]]]}, "inputs: whole numbers that are all 0 or 1 may be pixels or shares"),
        ({"instances": [[True, False]] * 3}, "instances: whole numbers that are all 0 or 1 may be pixels or shares"),
    ],
)
def test_what_is_no_invocation_is_refused_in_one_line(content: Any, said: str) -> None:
    with pytest.raises(Refusal) as refused:
        protocol.read_invocation(json.dumps(content).encode(), "application/json", SHAPE, 4)
    assert refused.value.status == 400
    assert said in refused.value.message


@pytest.mark.parametrize("kind", ["", "text/csv", "application/json; charset=latin-1", "application/json; a=b"])
def test_another_content_type_is_refused_as_mlflow_does(kind: str) -> None:
    with pytest.raises(Refusal) as refused:
        protocol.read_invocation(b'{"inputs": []}', kind, SHAPE, 4)
    assert refused.value.status == 415


def test_more_images_than_a_request_may_have_are_refused() -> None:
    for read in (
        lambda: protocol.read_inference(inference([0] * 30, [5, 3, 2]), SHAPE, 4),
        lambda: protocol.read_invocation(
            json.dumps({"inputs": np.zeros((5, *SHAPE), int).tolist()}).encode(), "application/json", SHAPE, 4
        ),
    ):
        with pytest.raises(Refusal) as refused:
            read()
        assert refused.value.status == 413
