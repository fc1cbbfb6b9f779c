"""Weights on disk: one self-contained safetensors file with the parameters and the model's config."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gradtrail.core.nn.losses import Loss
from gradtrail.core.nn.models import Model, ModelConfig, Params, by_path
from gradtrail.stages.common.params import as_written, validate
from gradtrail.stages.data.data_files import DatasetInfo
from gradtrail.support.errors import UserError, one_line

_KEY = "gradtrail"  # a single key: the format keeps several in no fixed order, and equal weights must be equal bytes


@dataclass(frozen=True, kw_only=True)
class WeightsInfo:
    """The metadata of a weights file."""

    model: ModelConfig
    loss: Loss  # the loss that was minimized
    dataset: DatasetInfo  # data set of the training
    epoch: int  # epochs of training behind these weights; 0 for the initial ones

    def title(self, kind: str, members: int) -> str:
        """Return the title of a figure: these weights, or the ensemble of several members."""
        return f"{kind} weights (epoch {self.epoch})" if members == 1 else f"ensemble of {members}, {kind} weights"


def write_weights(path: Path, params: Params, info: WeightsInfo) -> None:
    """Write parameters, float32, in the byte-stable, pickle-free safetensors format."""
    tensors = {name: np.asarray(leaf) for name, leaf in by_path(params).items()}
    metadata = {**as_written(info), "digest": _digest(tensors)}
    if info.model.normalization is None:  # as in files of versions without it, which have the same bytes
        del metadata["model"]["normalization"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(tensors, metadata={_KEY: json.dumps(metadata, sort_keys=True)}))


def read_weights(path: Path) -> tuple[Model, Params, WeightsInfo]:
    """Read a weights file: the model, its parameters as arrays on the host, and the file's metadata.

    Raises UserError, one line, if the file is missing, damaged, or holds other tensors than were written.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `dvc repro` makes it") from None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: no weights file of this project: {one_line(error)}") from None
    written = metadata.pop("digest", None)
    info = validate(metadata, WeightsInfo, f"{path}: {_KEY}")
    model = Model(info.model)
    if _digest(tensors) != written or tensors.keys() != by_path(model.abstract_params()).keys():
        raise UserError(f"{path}: its tensors are not those that were written; `dvc repro` makes it again")
    return model, model.from_paths(tensors), info


def read_members(paths: Mapping[int, Path], dataset: DatasetInfo) -> Iterator[tuple[int, Model, Params, WeightsInfo]]:
    """Yield seed, model, parameters and metadata of each member's weights, with one network in memory at a time.

    Raises UserError, one line, if a file is missing or damaged, or belongs to another data set.
    """
    for seed, path in paths.items():
        model, params, info = read_weights(path)
        require_same_data(path, info, dataset)
        yield seed, model, params, info


def require_same_data(path: Path, info: WeightsInfo, dataset: DatasetInfo) -> None:
    """Raise UserError unless the weights in a file were trained on this data set, with these splits."""
    if info.dataset != dataset:
        raise UserError(f"{path}: trained on other data ({info.dataset.label}) than data/processed ({dataset.label})")


def _digest(tensors: dict[str, np.ndarray]) -> str:
    """Return the SHA-256 of all tensors, by name."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        sha256.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return sha256.hexdigest()
