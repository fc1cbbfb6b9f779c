"""The peers of `benchmarks.serving` compute what the export does; each is skipped where its packages are missing."""

import itertools
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from exports import write_small_export
from safetensors.numpy import load_file

from benchmarks.serving.peers import Layer, build_onnx, layers_of, load
from gradtrail.stages.model.exported import WEIGHTS, read_export

MODELS = pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])


@MODELS
@pytest.mark.parametrize("peer", ["onnx", "torch"])
def test_its_probabilities_are_those_of_the_export(
    peer: str, model: Literal["linear", "mlp", "cnn"], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime" if peer == "onnx" else "torch", reason="in the benchmark's own environment")
    folder = write_small_export(tmp_path / "export", model=model)
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    found = load(peer, load_file(folder / WEIGHTS))(images)
    np.testing.assert_allclose(found, read_export(folder).predict(images), atol=1e-5)


@MODELS
def test_the_network_is_told_from_its_tensors(model: Literal["linear", "mlp", "cnn"], tmp_path: Path) -> None:
    tensors = load_file(write_small_export(tmp_path / "export", model=model) / WEIGHTS)
    convolutions, layers = layers_of(tensors)
    assert [len(convolutions), len(layers)] == {"linear": [0, 1], "mlp": [0, 2], "cnn": [1, 2]}[model]
    assert {kernel.ndim for kernel, _ in convolutions} == ({4} if convolutions else set())
    assert _widths(layers)[-1] == 10


def test_an_ensemble_is_refused(tmp_path: Path) -> None:
    tensors = load_file(write_small_export(tmp_path / "export", members=2) / WEIGHTS)
    with pytest.raises(ValueError, match="several networks"):
        layers_of(tensors)


def test_the_graph_has_the_weights_once(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="in the benchmark's own environment")
    tensors = load_file(write_small_export(tmp_path / "export", model="cnn") / WEIGHTS)
    graph = build_onnx(tensors).graph
    sizes = sum(int(np.prod(value.dims)) for value in graph.initializer if value.data_type == 1)
    assert sizes == sum(tensor.size for tensor in tensors.values()) + 1


def _widths(layers: list[Layer]) -> list[int]:
    for (before, _), (after, _) in itertools.pairwise(layers):
        assert before.shape[1] == after.shape[0]
    return [kernel.shape[1] for kernel, _ in layers]
