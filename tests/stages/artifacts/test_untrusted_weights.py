"""Damaged and forged weights: one line, or weights that their model has; no memory, and no minutes, for claims."""

import dataclasses
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest
from factories import CNN, dataset_info, model_config
from hypothesis import given
from hypothesis import strategies as st
from untrusted import MAX_BYTES, damaged, fuzz, on_linux, refusal, taken_bytes

from gradtrail.core.nn.models import Model
from gradtrail.stages.artifacts.weights import WeightsInfo, read_weights, write_weights

INFO = WeightsInfo(model=model_config(), label_smoothing=0.1, dataset=dataset_info(), epoch=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "final.safetensors"


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and the bytes of its tensors."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def make_good() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder) / "w", Model(INFO.model).init(key=jax.random.key(0)), INFO)
        return (Path(folder) / "w").read_bytes()


GOOD = make_good()
HEADER, TENSORS = parts(GOOD)
ABOUT: dict[str, Any] = json.loads(HEADER["__metadata__"]["gradtrail"])  # with the digest of the tensors


def packed(header: bytes, tensors: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + tensors


def described(about: str) -> bytes:
    """Return a file that says `about` of itself."""
    return packed(json.dumps(HEADER | {"__metadata__": {"gradtrail": about}}).encode(), TENSORS)


def refused(path: Path, data: bytes) -> str | None:
    path.write_bytes(data)
    line = refusal(lambda: read_weights(path))
    assert line is None or line.startswith(f"{path}: ")
    return line


def test_what_was_written_is_read(path: Path) -> None:
    assert refused(path, GOOD) is None
    assert refused(path, described(json.dumps(ABOUT))) is None


@fuzz(60)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(path: Path, data: st.DataObject) -> None:
    refused(path, data.draw(damaged(GOOD)))


@on_linux
@pytest.mark.parametrize("length", [0, 1, 10**6, 10**8, 2**31, 2**63, 2**64 - 1])
def test_a_length_of_the_header_that_lies_is_refused_and_takes_no_memory(path: Path, length: int) -> None:
    data = struct.pack("<Q", length) + GOOD[8:]
    assert taken_bytes(lambda: refused(path, data)) < MAX_BYTES
    assert refused(path, data)


TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F64", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8", "U64", "BOOL", "C64", "?"]),
        "shape": st.lists(st.sampled_from([-1, 0, 1, 3, 5, 12, 2**31, 2**62, 2**64]), max_size=3),
        "data_offsets": st.lists(st.sampled_from([-1, 0, 20, 260, 272, 332, 2**40, 2**64]), min_size=1, max_size=3),
    }
)


@fuzz(40)
@given(name=st.sampled_from(["layers/0/bias", "layers/1/kernel", "other"]), tensor=TENSOR)
def test_a_header_that_lies_of_a_tensor_is_refused(path: Path, name: str, tensor: dict[str, Any]) -> None:
    if HEADER.get(name) != tensor:
        assert refused(path, packed(json.dumps(HEADER | {name: tensor}).encode(), TENSORS))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "BOOL"])
def test_tensors_of_a_dtype_that_no_model_has_are_refused(path: Path, dtype: str) -> None:
    tensor = HEADER["layers/0/bias"] | {"dtype": dtype, "shape": [20]}
    assert refused(path, packed(json.dumps(HEADER | {"layers/0/bias": tensor}).encode(), TENSORS))


@pytest.mark.parametrize("header", [b"", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b'{"a": 1, "a": 2}', b"\xff" * 9])
def test_a_header_that_is_none_is_refused(path: Path, header: bytes) -> None:
    assert refused(path, packed(header, TENSORS))


@pytest.mark.parametrize(
    "about",
    [
        "",
        "x",
        "null",
        "{}",
        "[" * 100_000,
        '{"model":' * 50_000,
        "9" * 5000,
        '{"epoch": NaN}',
        '"' + "x" * 100_000 + '"',
    ],
    ids=lambda about: about[:10],
)
def test_a_description_that_is_none_is_refused(path: Path, about: str) -> None:
    assert refused(path, described(about))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@fuzz(40)
@given(key=st.sampled_from([*ABOUT, *(f"model.{key}" for key in ABOUT["model"]), "new", "new\nline"]), value=JSON)
def test_a_description_with_any_value_is_read_or_refused(path: Path, key: str, value: Any) -> None:
    outer, _, inner = key.rpartition(".")
    changed = {outer: ABOUT[outer] | {inner: value}} if outer else {key: value}
    refused(path, described(json.dumps(ABOUT | changed)))


def mlp(*hidden: Any) -> dict[str, Any]:
    return {"mlp": {"hidden": list(hidden), "dropout": 0.0}}


def cnn(**overrides: Any) -> dict[str, Any]:
    return {"kind": "cnn", "mlp": None, "cnn": dataclasses.asdict(CNN) | overrides}


MODELS: dict[str, dict[str, Any]] = {
    "wide": mlp(10**12),
    "wide beyond 64 bits": mlp(2**62, 2**62),
    "wide beyond all": mlp(10**100),
    "deep": mlp(*[1] * 10**5),
    "negative": mlp(-1),
    "of no units": mlp(0),
    "of truth": mlp(True),
    "of no number": mlp(float("nan")),
    "of no pixels": {"image_shape": [0, 0]},
    "of negative pixels": {"image_shape": [-5, 3]},
    "of negative pixels twice": {"image_shape": [-4, -3]},
    "of many pixels": {"image_shape": [10**9, 10**9]},
    "of no classes": {"num_classes": 0},
    "of negative classes": {"num_classes": -1},
    "of many classes": {"num_classes": 10**12},
    "of many convolutions": cnn(convolutions=10**9),
    "of deep stacks": cnn(convolutions=250, hidden=[5] * 250),
    "of many stacks": cnn(channels=[1] * 100),
    "of many channels": cnn(channels=[10**12]),
    "of a wide kernel": cnn(kernel_size=10**12 + 1),
    "of many groups": cnn(norm="group", groups=10**12, channels=[10**12]),
}


@on_linux
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_the_tensors_are_not_of_is_refused_soon_and_takes_no_memory(path: Path, name: str) -> None:
    data = described(json.dumps(ABOUT | {"model": ABOUT["model"] | MODELS[name]}))
    assert taken_bytes(lambda: refused(path, data)) < 4 * MAX_BYTES  # JAX keeps what it traced
    assert refused(path, data)


@pytest.mark.parametrize(("key", "value"), [("epoch", -1), ("label_smoothing", 1.0), ("label_smoothing", -0.1)])
def test_a_training_that_cannot_have_been_is_refused_by_its_key(path: Path, key: str, value: Any) -> None:
    assert f"gradtrail.{key}" in (refused(path, described(json.dumps(ABOUT | {key: value}))) or "")
