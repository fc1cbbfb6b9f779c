"""The folder of an exported model; `artifacts/exported` reads it."""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from safetensors.numpy import save

from gradtrail.core.export.forward import ExportConfig, Platform, export_forward, tensors
from gradtrail.core.nn.models import HostParams, Model, Params, WeightsKind
from gradtrail.stages.artifacts.calibration import Evaluated
from gradtrail.stages.artifacts.data_files import DatasetInfo
from gradtrail.stages.artifacts.exported import FORMAT, MANIFEST, WEIGHTS, Manifest, program_name
from gradtrail.stages.artifacts.weights import read_weights, require_same_data
from gradtrail.stages.common.files import write_json
from gradtrail.stages.datasets import class_names
from gradtrail.support.errors import UserError

_PACKAGES = ("flax", "jax", "jaxlib")  # packages whose versions are recorded


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network to export, or an ensemble of several."""

    model: Model  # the network
    members: Mapping[int, Params | HostParams]  # parameters of each member, by seed
    weights: WeightsKind  # `final` or `best`
    epochs: tuple[int, ...]  # epochs of training behind the weights of each member
    dataset: str  # data set of the training, such as `mnist 1234abcd`
    classes: tuple[str, ...]  # name of the class of each output
    temperature: float  # temperature of the probabilities


def read_network(evaluated: Evaluated, dataset: DatasetInfo) -> Network:
    """Read the networks that were evaluated.

    Raises:
        UserError: a file is missing or damaged, or of another model or data set; one line.
    """
    first, members, epochs = None, {}, []
    for seed, path in evaluated.weights.items():
        model, members[seed], about = read_weights(path)
        require_same_data(path, about, dataset)
        first = first or model
        epochs.append(about.epoch)
        if model.config != first.config:
            raise UserError(f"{path}: weights of {model.config.name}, but the first member is {first.config.name}")
    assert first is not None  # noqa: S101 - there is at least one
    return Network(
        model=first,
        members=members,
        weights=evaluated.kind,
        epochs=tuple(epochs),
        dataset=dataset.label,
        classes=class_names(dataset.name, dataset.num_classes),
        temperature=evaluated.temperature,
    )


def write_export(folder: Path, network: Network, config: ExportConfig) -> Manifest:
    """Write an exported model to a new folder: the same bytes for the same network and versions, in any place.

    Returns:
        The content of `manifest.json`.
    """
    folder.mkdir(parents=True)
    leaves = tensors([*network.members.values()], network.temperature)
    contents, conventions = {WEIGHTS: save(leaves)}, set()
    for platform in get_args(Platform):
        exported = export_forward(network.model, leaves, len(network.members), platform)
        conventions.add(exported.calling_convention_version)
        contents[program_name(platform)] = bytes(exported.serialize())
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (calling_convention,) = conventions
    manifest = Manifest(
        format=FORMAT,
        name=config.name,
        model=network.model.config.name,
        weights=network.weights,
        seeds=tuple(network.members),
        epochs=network.epochs,
        dataset=network.dataset,
        image_shape=network.model.config.image_shape,
        classes=network.classes,
        temperature=network.temperature,
        batch_sizes=config.batch_sizes,
        versions={name: version(name) for name in _PACKAGES},
        calling_convention=calling_convention,
        files={name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    )
    write_json(folder / MANIFEST, dataclasses.asdict(manifest))
    return manifest
