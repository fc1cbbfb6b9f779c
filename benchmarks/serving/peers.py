"""The same network in ONNX Runtime and in PyTorch, behind the application of `gradtrail serve`.

    ENVIRONMENT/bin/python -m benchmarks.serving.peers onnx|torch EXPORT --port 8081

Runs in an environment of its own, which has the peer and, behind it, the packages of the application. JAX is not
imported. Weights and temperature are those of the export; the network is told from the names of its tensors.
"""

import argparse
import asyncio
import itertools
import sys
import types
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]
Layer = tuple[np.ndarray, np.ndarray]  # kernel, bias
_OPSET, _IR = 17, 8


def build_onnx(tensors: Tensors) -> Any:
    """Return the forward pass as an ONNX model: `images`, uint8 (batch, height, width) → `probabilities`.

    Raises:
        ValueError: the network has a normalization, or is an ensemble.
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    convolutions, layers = layers_of(tensors)
    values: dict[str, np.ndarray] = {"white": np.array(255, np.float32), "temperature": tensors["temperature"]}
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["pixels", "white"], ["x"]),
    ]
    last = "x"
    if convolutions:
        values["channel"] = np.asarray([1], np.int64)
        nodes.append(helper.make_node("Unsqueeze", [last, "channel"], ["c"]))
        last = "c"
    for index, (kernel, bias) in enumerate(convolutions):
        values |= {f"ck{index}": np.ascontiguousarray(kernel.transpose(3, 2, 0, 1)), f"cb{index}": bias}
        edge = kernel.shape[0] // 2
        nodes.append(helper.make_node("Conv", [last, f"ck{index}", f"cb{index}"], [f"cv{index}"], pads=[edge] * 4))
        nodes.append(helper.make_node("MaxPool", [f"cv{index}"], [f"cp{index}"], kernel_shape=[2, 2], strides=[2, 2]))
        nodes.append(helper.make_node("Relu", [f"cp{index}"], [f"cr{index}"]))
        last = f"cr{index}"
    nodes.append(helper.make_node("Flatten", [last], ["flat"], axis=1))
    last = "flat"
    for index, (kernel, bias) in enumerate(layers):
        values |= {f"k{index}": kernel, f"b{index}": bias}
        nodes.append(helper.make_node("Gemm", [last, f"k{index}", f"b{index}"], [f"l{index}"]))
        last = f"l{index}"
        if index < len(layers) - 1:
            nodes.append(helper.make_node("Relu", [last], [f"r{index}"]))
            last = f"r{index}"
    nodes.append(helper.make_node("Div", [last, "temperature"], ["scaled"]))
    nodes.append(helper.make_node("Softmax", ["scaled"], ["probabilities"], axis=1))
    graph = helper.make_graph(
        nodes,
        "forward",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", "height", "width"])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", "classes"])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
    checker.check_model(model)
    return model


def build_torch(tensors: Tensors) -> Any:
    """Return the forward pass as a PyTorch module: uint8 (batch, height, width) → probabilities."""
    import torch
    from torch import nn

    convolutions, layers = layers_of(tensors)
    parts = list[Any]()
    for kernel, bias in convolutions:
        size, _, num_inputs, num_outputs = kernel.shape
        convolution = nn.Conv2d(num_inputs, num_outputs, size, padding=size // 2)
        _set(convolution, kernel.transpose(3, 2, 0, 1), bias)
        parts += [convolution, nn.MaxPool2d(2), nn.ReLU()]
    parts.append(nn.Flatten())
    for kernel, bias in layers:
        linear = nn.Linear(*kernel.shape)
        _set(linear, kernel.T, bias)
        parts += [linear, nn.ReLU()]
    network = nn.Sequential(*parts[:-1]).eval()
    temperature = float(tensors["temperature"])

    def forward(images: Any) -> Any:
        with torch.inference_mode():
            pixels = images.float() / 255
            return torch.softmax(network(pixels[:, None] if convolutions else pixels) / temperature, dim=1)

    return forward


def _set(module: Any, weight: np.ndarray, bias: np.ndarray) -> None:
    import torch

    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
        module.bias.copy_(torch.from_numpy(np.array(bias)))


def layers_of(tensors: Tensors) -> tuple[list[Layer], list[Layer]]:
    """Return kernel and bias of each convolution, one in each stack, and of each dense layer."""
    if any("norm" in name for name in tensors) or tensors["layers/0/kernel"].ndim != 2:
        raise ValueError("a network with normalization, or several networks: not for this benchmark")
    blocks = _layers(tensors, "blocks/{}/convolution")
    return blocks, _layers(tensors, "layers/{}")


def _layers(tensors: Tensors, pattern: str) -> list[Layer]:
    names = itertools.takewhile(lambda name: f"{name}/kernel" in tensors, map(pattern.format, itertools.count()))
    return [(tensors[f"{name}/kernel"], tensors[f"{name}/bias"]) for name in names]


def load(kind: str, tensors: Tensors) -> Any:
    """Return a function uint8 images → probabilities, both as arrays."""
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(
            build_onnx(tensors).SerializeToString(), providers=["CPUExecutionProvider"]
        )
        return lambda images: session.run(None, {"images": images})[0]
    import torch

    forward = build_torch(tensors)
    return lambda images: forward(torch.from_numpy(images)).numpy()


class Peer:
    """What the server takes for an exported model."""

    def __init__(self, manifest: Any, function: Any):
        self.manifest, self._function = manifest, function

    def run(self, images: np.ndarray) -> np.ndarray:
        """Return the probabilities of a batch."""
        return self._function(images)


async def serve(kind: str, folder: Path, port: int) -> None:
    """Serve an export by a peer, in batches of the sizes of its manifest, each run once before it is ready."""
    import uvicorn
    from safetensors.numpy import load_file

    from gradtrail.serving.metrics import ServerMetrics
    from gradtrail.serving.server.app import create_app
    from gradtrail.serving.server.batching import BatchingConfig
    from gradtrail.serving.server.router import Router
    from gradtrail.stages.model.exported import WEIGHTS_FILE, read_manifest

    manifest = read_manifest(folder)
    model: Any = Peer(manifest, load(kind, load_file(folder / WEIGHTS_FILE)))
    for size in manifest.batch_sizes:
        model.run(np.zeros((size, *manifest.image_shape), np.uint8))
    router = Router(batching=BatchingConfig(), metrics=ServerMetrics())
    router.swap(router.host(model, "peer"))
    config = uvicorn.Config(
        create_app(router), port=port, http="httptools", ws="none", lifespan="off", access_log=False
    )
    await uvicorn.Server(config).serve()
    router.close()


def without_jax() -> None:
    """Put names in the place of JAX, which the application knows by its types alone."""
    names: dict[str, Any] = {"Array": np.ndarray, "export": types.SimpleNamespace(Exported=object)}
    module = types.ModuleType("jax")
    module.__spec__ = ModuleSpec("jax", None)
    vars(module).update(names)
    sys.modules["jax"] = module


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["onnx", "torch"])
    parser.add_argument("export", type=Path)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    without_jax()
    sys.setswitchinterval(0.0005)  # as `gradtrail serve`
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.kind, options.export, options.port))


if __name__ == "__main__":
    main()
