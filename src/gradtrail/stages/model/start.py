"""Trained weights that a training starts from: the tensors of a safetensors file that fit the network."""

import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from gradtrail.core.nn.models import Model, by_path
from gradtrail.core.train.start import ReadStart, StartConfig
from gradtrail.stages.common.files import digest, write_csv, write_json
from gradtrail.stages.model.exported import WEIGHTS_FILE
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.paths import root

_FLOATS = ("F64", "F32", "F16", "BF16")  # types of tensors that are taken, as safetensors names them


@dataclass(frozen=True, kw_only=True)
class Start:
    """Weights that were read."""

    config: ReadStart
    tensors: Mapping[str, Float[np.ndarray, "..."]]  # path of each parameter that was taken → its values, float32
    # `tensor`, `shape`, `size` and `outcome` of each parameter, then of each tensor of the file that is none
    table: list[dict[str, Any]]
    md5: str  # digest of the file as DVC has it, by which the run that wrote it is found

    def describe(self) -> str:
        """Return a line on the file, and one for the tensors of each layer that have the same outcome."""
        lines = [f"{self.config.weights}: {sum(values.size for values in self.tensors.values()):,} parameters taken"]
        for (_, outcome), rows in itertools.groupby(
            self.table, lambda row: (row["tensor"].rpartition("/")[0], row["outcome"])
        ):
            names, sizes = zip(*((row["tensor"], row["size"]) for row in rows), strict=True)
            lines.append(f"  {', '.join(names)} ({sum(sizes):,}): {outcome}")
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Write the table, and the digests of the file, to the results of the training."""
        write_csv(folder / "start.csv", self.table)
        write_json(folder / "start.json", {"md5": self.md5, "sha256": self.config.sha256})


def read_start(config: StartConfig, model: Model) -> Start:
    """Read the tensors that have the path and the shape of a parameter, from a file or the folder of an export.

    The path is relative to the root.

    Raises UserError, one line, if nothing fits, the params have another digest, or a layer cannot be frozen.
    """
    path, params = root() / Path(config.weights or "").expanduser(), by_path(model.abstract_params())
    path = path / WEIGHTS_FILE if path.is_dir() else path
    try:
        with safe_open(path, framework="numpy") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in stored.items()}
            faults = {name: _fault(stored.get(name), leaf.shape) for name, leaf in params.items()}
            tensors = {name: file.get_tensor(name).astype(np.float32) for name, fault in faults.items() if not fault}
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except (SafetensorError, OSError, ValueError) as error:
        why = "no such file; DVC removes the outputs of `train` before it runs: keep a copy elsewhere"
        why = why if isinstance(error, FileNotFoundError) else f"no safetensors file: {one_line(error)[:200]}"
        raise UserError(f"train.start.weights: {path}: {why}") from None
    _require_fit(config, path, model, faults)
    if sha256 != config.sha256:
        found = f"train.start.sha256 must be the digest of {path}, got {config.sha256 or 'null'}"
        raise UserError(f"{found}: -S train.start.sha256={sha256}")

    outcomes = {name: fault or f"taken{', frozen' * config.is_frozen(name)}" for name, fault in faults.items()}
    outcomes |= dict.fromkeys(sorted(shapes.keys() - params.keys()), "not in the network")
    shapes |= {name: leaf.shape for name, leaf in params.items()}
    sizes = {name: {"shape": " × ".join(map(str, shape)), "size": math.prod(shape)} for name, shape in shapes.items()}
    table = [{"tensor": name, **sizes[name], "outcome": outcome} for name, outcome in outcomes.items()]
    read = ReadStart(**vars(config), drawn=tuple(name for name, fault in faults.items() if fault))
    return Start(config=read, tensors=tensors, table=table, md5=digest(path))


def _fault(tensor: Any, shape: tuple[int, ...]) -> str:
    """Return why a tensor of a file, or None, is not taken for a parameter; empty if it is."""
    if tensor is None:
        return "not in the file; drawn anew"
    if tensor.get_dtype() not in _FLOATS:
        return f"other type: {tensor.get_dtype()}; drawn anew"
    stored = tuple(tensor.get_shape())
    return "" if stored == shape else f"other shape: {stored} against {shape}; drawn anew"


def _require_fit(config: StartConfig, path: Path, model: Model, faults: Mapping[str, str]) -> None:
    """Raise UserError, one line, if nothing is taken, or a name of `freeze` is that of no layer or of one not taken."""
    lines, layers = [f"{name}: {fault}" for name, fault in faults.items() if fault], model.layers()
    if len(lines) == len(faults):
        raise UserError(f"train.start.weights: {path}: no tensor fits, such as {'; '.join(lines[:2])}")
    for name in config.freeze:
        if not any(f"{layer}/".startswith(f"{name}/") for layer in layers):
            raise UserError(f"train.start.freeze: no layer is {name!r} or begins so; there are {', '.join(layers)}")
    if frozen := [line for line in lines if config.is_frozen(line.partition(":")[0])]:
        raise UserError(f"train.start.freeze: {frozen[0]}, which freezing would keep")
    if all(map(config.is_frozen, faults)):
        raise UserError(f"train.start.freeze: must leave a layer to train, got {list(config.freeze)}")
