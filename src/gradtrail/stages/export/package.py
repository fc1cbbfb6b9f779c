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
from gradtrail.stages.artifacts.exported import FORMAT, MANIFEST, WEIGHTS, Manifest, program_name
from gradtrail.stages.common.files import write_json

_PACKAGES = ("flax", "jax", "jaxlib")  # whose versions made the program


@dataclass(frozen=True, kw_only=True)
class Network:
    """What is exported: a network, or an ensemble of several.

    Attributes:
        model: the network.
        members: its parameters, or those of each member, by seed.
        weights: which epoch's they are.
        dataset: that it was trained on, such as `mnist 1234abcd`.
        classes: what each output says.
        temperature: that calibrates the probabilities.
    """

    model: Model
    members: Mapping[int, Params | HostParams]
    weights: WeightsKind
    dataset: str
    classes: tuple[str, ...]
    temperature: float


def write_export(folder: Path, network: Network, config: ExportConfig) -> Manifest:
    """Write an exported model to a new folder: the same bytes for the same network and versions, wherever it is.

    Returns:
        What `manifest.json` says.
    """
    folder.mkdir(parents=True)
    named = tensors([*network.members.values()], network.temperature)
    contents, conventions = {WEIGHTS: save(named)}, set()
    for platform in get_args(Platform):
        exported = export_forward(network.model, named, len(network.members), platform)
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
