"""Small exported models, written within a second."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import numpy as np

from gradtrail.core import export
from gradtrail.core.export import ExportConfig
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.cnn import CNN
from gradtrail.core.nn.mlp import MLP, Linear
from gradtrail.core.nn.models import HostParams, Model, ModelConfig
from gradtrail.stages.export import Network, write_export

SHAPE = (28, 28)
CLASSES = tuple(map(str, range(10)))
_CNN = CNN(
    channels=(4,), convolutions=1, kernel_size=3, norm="none", groups=2, hidden=(8,), activation="relu", dropout=0.0
)
_CERTAIN = 20.0  # a logit beyond those of random weights


def small_network(
    *,
    seed: int = 0,
    always: int | None = None,
    model: Literal["linear", "mlp", "cnn"] = "mlp",
    members: int = 1,
    image_shape: tuple[int, ...] = SHAPE,
) -> Network:
    """Return a network of random weights; one that says a class `always`, with high confidence."""
    mlp = MLP(hidden=(8,), activation="relu", dropout=0.0)
    networks: dict[str, Any] = {"linear": Linear(), "mlp": mlp, "cnn": _CNN}
    config = ModelConfig(
        network=networks[model],
        precision="float32",
        image_shape=image_shape,
        num_classes=len(CLASSES),
    )
    network = Model(config)
    of_seed = {}
    for each in range(seed, seed + members):
        params = random_params(network, each)
        if always is not None:
            last = params["layers"][max(params["layers"])]
            last["kernel"][:], last["bias"][:] = 0, _CERTAIN * (np.arange(len(CLASSES)) == always)
        of_seed[each] = params
    return Network(
        model=network,
        members=of_seed,
        weights="final",
        epochs=(1,) * members,
        dataset="digits 00000000",
        classes=CLASSES,
        temperature=1.5,
        validation_images=100,
    )


def write_small_export(
    folder: Path,
    *,
    seed: int = 0,
    name: str = "digits",
    always: int | None = None,
    model: Literal["linear", "mlp", "cnn"] = "mlp",
    members: int = 1,
    batch_sizes: tuple[int, ...] = (1, 8),
    precisions: tuple[Precision, ...] = (),
    image_shape: tuple[int, ...] = SHAPE,
    **overrides: Any,
) -> Path:
    """Write an exported network of random weights to a new folder, and return it; `overrides` are of `Network`."""
    random = small_network(seed=seed, always=always, model=model, members=members, image_shape=image_shape)
    network = dataclasses.replace(random, **overrides)
    write_export(folder, network, ExportConfig(name=name, batch_sizes=batch_sizes, precisions=precisions))
    return folder


def write_wrong_export(folder: Path, *, answers: Literal["NaN", "-1 to 2"]) -> Path:
    """Write an exported network whose answers are no probabilities, though its digests are in order; return it."""
    network, right = small_network(), export.forward

    def beyond(*arguments: Any) -> Callable[..., Any]:
        return lambda *inputs: 3 * right(*arguments)(*inputs) - 1

    if answers == "NaN":
        params = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), network.members[0])
        network = dataclasses.replace(network, members={0: params})
    with mock.patch.object(export, "forward", beyond if answers == "-1 to 2" else right):
        write_export(folder, network, ExportConfig(name="digits", batch_sizes=(1, 8), precisions=()))
    return folder


def random_params(model: Model, seed: int = 0) -> HostParams:
    """Draw parameters, none of them 0, without compiling anything."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        deviation = 0.1 if leaf.ndim == 1 else np.sqrt(2 / np.prod(leaf.shape[:-1]))
        return rng.normal(scale=deviation, size=leaf.shape).astype(leaf.dtype)

    return jax.tree.map(draw, model.abstract_params())
