"""Trained weights that a training starts from: the tensors of a safetensors file that fit the network."""

import hashlib
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
from gradtrail.stages.common.files import LFS_POINTER, digest, is_lfs_pointer, write_csv, write_json
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.paths import root

_FLOATS = ("F64", "F32", "F16", "BF16")  # types of tensors that are taken, as safetensors names them


@dataclass(frozen=True, kw_only=True)
class Start:
    """Weights that were read."""

    config: ReadStart
    tensors: Mapping[str, Float[np.ndarray, "..."]]  # path of each parameter that was taken → its values, float32
    # `tensor`, `shape`, `size` and `outcome` of each parameter, and of each tensor of the file that is none
    table: tuple[Mapping[str, Any], ...]
    md5: str  # digest of the file as DVC has it, by which the run that wrote it is found

    def describe(self) -> str:
        """Return a line on the file, and one for the tensors of each layer that have the same outcome."""
        groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for row in self.table:
            groups.setdefault((row["tensor"].rpartition("/")[0], row["outcome"]), []).append(row)
        taken, drawn = (
            sum(row["size"] for row in self.table if row["tensor"] in names)
            for names in (self.tensors, self.config.drawn)
        )
        lines = [f"{self.config.weights}: {taken:,} parameters taken, {drawn:,} drawn"]
        for (layer, outcome), rows in groups.items():
            names = ", ".join(row["tensor"].rpartition("/")[2] for row in rows)
            lines.append(f"  {f'{layer} {names}'.strip()} ({sum(row['size'] for row in rows):,}): {outcome}")
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Write the table, and the digests of the file, to the results of the training."""
        write_csv(folder / "start.csv", self.table)
        write_json(folder / "start.json", {"md5": self.md5, "sha256": self.config.sha256})


def read_start(config: StartConfig, model: Model) -> Start:
    """Read the tensors that have the path and the shape of a parameter; the file's path is relative to the root.

    Raises:
        UserError: nothing in the file fits, the params have another digest, or a layer cannot be frozen; one line.
    """
    path, params = root() / Path(config.weights or "").expanduser(), by_path(model.abstract_params())
    try:
        with safe_open(path, framework="numpy") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in stored.items()}
            faults = {name: _fault(stored.get(name), leaf.shape) for name, leaf in params.items()}
            tensors = {name: file.get_tensor(name).astype(np.float32) for name, fault in faults.items() if not fault}
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        why = "no such file; DVC removes the outputs of `train` before it runs: keep a copy elsewhere"
        raise UserError(f"train.start.weights: {path}: {why}") from None
    except (SafetensorError, OSError, ValueError) as error:
        is_pointer = path.is_file() and is_lfs_pointer(path)
        why = LFS_POINTER if is_pointer else f"no safetensors file: {one_line(error)[:200]}"
        raise UserError(f"train.start.weights: {path}: {why}") from None

    if not tensors:
        stacked = [name for name in shapes.keys() & params.keys() if shapes[name][1:] == params[name].shape]
        of_members = "it is of several members: name the file of one, in models/members"
        of_others = f"a parameter is {next(iter(params))}, a tensor {next(iter(shapes), 'none')}"
        why = f"no tensor has the path and the shape of a parameter; {of_members if stacked else of_others}"
        raise UserError(f"train.start.weights: {path}: {why}")
    _require_freezable(config, model, faults)
    if sha256 != config.sha256:
        how = f"the digest of {path}: -S train.start.sha256={sha256}"
        raise UserError(f"train.start.sha256 must be {how}, got {config.sha256 or 'null'}")

    outcomes = {name: "taken, frozen" if config.is_frozen(name) else "taken" for name in tensors}
    outcomes |= {name: f"{fault}; drawn anew" for name, fault in faults.items() if fault}
    outcomes |= dict.fromkeys(sorted(shapes.keys() - params.keys()), "not in the network")
    all_shapes = shapes | {name: leaf.shape for name, leaf in params.items()}
    rows = [
        {
            "tensor": name,
            "shape": " × ".join(map(str, all_shapes[name])),
            "size": math.prod(all_shapes[name]),
            "outcome": outcomes[name],
        }
        for name in (*params, *(name for name in outcomes if name not in params))
    ]
    drawn = tuple(name for name, fault in faults.items() if fault)
    read = ReadStart(**vars(config), drawn=drawn)
    return Start(config=read, tensors=tensors, table=tuple(rows), md5=digest(path))


def _fault(tensor: Any, shape: tuple[int, ...]) -> str:
    """Return why a tensor of a file, or None, is not taken for a parameter; empty if it is."""
    if tensor is None:
        return "not in the file"
    if tensor.get_dtype() not in _FLOATS:
        return f"other type: {tensor.get_dtype()}"
    stored = tuple(tensor.get_shape())
    return "" if stored == shape else f"other shape: {stored} against {shape}"


def _require_freezable(config: StartConfig, model: Model, faults: Mapping[str, str]) -> None:
    """Raise UserError, one line, if a name of `freeze` is that of no layer, or of one that is drawn, or of all."""
    layers = model.layers()
    for name in config.freeze:
        if not any(f"{layer}/".startswith(f"{name}/") for layer in layers):
            raise UserError(f"train.start.freeze: no layer is {name!r} or begins so; there are {', '.join(layers)}")
    for name, fault in faults.items():
        if fault and config.is_frozen(name):
            raise UserError(f"train.start.freeze: {name} would stay as it is drawn: {fault}")
    if all(map(config.is_frozen, layers)):
        raise UserError(f"train.start.freeze must leave a layer to train, got {[*config.freeze]}")
