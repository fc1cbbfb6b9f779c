"""An exported model on disk: programs and weights that JAX runs without Flax and without this project.

A folder with `manifest.json`, `weights.safetensors`, and `forward.<platform>.bin` for each platform, the forward pass
as `jax.export` serializes it; `forward.<platform>.<precision>.bin` is the one in another precision. `stages/export`
writes it; servers, `predict` and logged models of MLflow read it. This module needs jax, jaxtyping, numpy, flatbuffers
and safetensors; `docs/release.md` reads one without it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Float, UInt8
from safetensors import SafetensorError
from safetensors.numpy import load

from gradtrail.support.errors import UserError, one_line

FORMAT = 2
MANIFEST, WEIGHTS_FILE = "manifest.json", "weights.safetensors"
SUM_TOLERANCE = 1e-3  # of the sum of probabilities, which float32 rounds to about 1e-6
PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}  # backend of JAX → the platform that a program was lowered for

Images = UInt8[np.ndarray, "images height width *channels"]
Probabilities = Float[np.ndarray, "images classes"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of an exported model."""

    format: int  # version of this layout
    name: str  # name in MLflow's registry, and in the paths of a server's endpoints
    model: str  # the network, such as `mlp-256-128`
    weights: str  # `final` or `best`
    seeds: tuple[int, ...]  # seed of each member; several are an ensemble, whose mean probabilities count
    epochs: tuple[int, ...]  # epochs of training behind the weights of each member
    dataset: str  # data set of the training, such as `mnist 1234abcd`
    # height and width in pixels, in color also the number of channels; images are uint8, grayscale as bright ink on 0
    image_shape: tuple[int, ...]
    classes: tuple[str, ...]  # name of the class of each output
    temperature: float  # temperature of the probabilities
    validation_images: int  # to which it was fitted
    batch_sizes: tuple[int, ...]  # batch sizes that a server compiles, ascending
    versions: Mapping[str, str]  # versions of jax, jaxlib and flax at the export
    calling_convention: int  # version of the serialized programs' calling convention
    files: Mapping[str, str]  # SHA-256 of each of the other files, hexadecimal, by name

    @property
    def digest(self) -> str:
        """SHA-256 over the manifest, which has the digests of all files: equal ones answer alike."""
        content = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def export_name(name: str | None, dataset: str) -> str:
    """Return `export.name` or, if that is empty, the name of the data set; MNIST's models are called digits."""
    dataset = dataset.partition(" ")[0]
    return name or ("digits" if dataset == "mnist" else dataset)


class ExportedModel:
    """A model that answers: `compile` for one batch size, or `predict` for any number of images."""

    def __init__(self, manifest: Manifest, program: Callable[..., Array], tensors: Mapping[str, np.ndarray]):
        self.manifest = manifest
        self.program = program  # tensors, images → probabilities
        self.tensors = jax.device_put(dict(tensors))
        self._call = jax.jit(program)
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def compile(self, batch_size: int) -> int:
        """Compile for one batch size, or load the program from JAX's cache; return bytes of its temporary arrays."""
        if batch_size not in self._compiled:
            images = jax.ShapeDtypeStruct((batch_size, *self.manifest.image_shape), np.uint8)
            self._compiled[batch_size] = self._call.lower(self.tensors, images).compile()
        memory: Any = self._compiled[batch_size].memory_analysis()
        return int(memory.temp_size_in_bytes)

    def run(self, images: Images) -> Array:
        """Return the answers to a batch of a compiled size, unchecked; the computation may still be running."""
        return self._compiled[len(images)](self.tensors, images)

    def predict(self, images: Images) -> Probabilities:
        """Return the probabilities of any number of images, padded to the sizes of the manifest.

        Raises UserError, one line, if the answers of the model are no probabilities.
        """
        sizes, parts = self.manifest.batch_sizes, []
        for start in range(0, len(images), sizes[-1]):
            part = images[start : start + sizes[-1]]
            size = next(size for size in sizes if size >= len(part))
            self.compile(size)
            padded = np.pad(part, [(0, size - len(part)), *[(0, 0)] * (part.ndim - 1)])
            parts.append(np.asarray(self.run(padded))[: len(part)])
        answers = np.concatenate(parts) if parts else np.zeros((0, len(self.manifest.classes)), np.float32)
        if fault := probability_fault(answers, self.manifest):
            raise fault
        return answers


def are_probabilities(answers: Float[np.ndarray, "images classes"]) -> Bool[np.ndarray, " images"]:
    """Return True for each row that is a distribution over the classes: no value below 0, and the sum is 1."""
    with np.errstate(invalid="ignore"):  # the sum of both infinities
        sums = answers.sum(axis=1, dtype=np.float64)
    return (answers >= 0).all(axis=1) & (np.abs(sums - 1) <= SUM_TOLERANCE)  # NaN is False in both


def probability_fault(answers: Float[np.ndarray, "images classes"], manifest: Manifest) -> UserError | None:
    """Return the error, one line, if some answers are not distributions; None otherwise."""
    wrong = answers[~are_probabilities(answers)]
    if not len(wrong):
        return None
    values = np.array2string(wrong[0], precision=3, threshold=4, edgeitems=2)
    count = f"{len(wrong):,} of {len(answers):,} images"
    return UserError(f"{manifest.name}: its answers to {count} are not probabilities, such as {values}")


def read_manifest(folder: Path) -> Manifest:
    """Read the description of an exported model; raise UserError, one line, if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {str(content['format'])[:20]}; this version reads format {FORMAT}")
        for key in ("seeds", "epochs", "image_shape", "classes", "batch_sizes"):
            content[key] = tuple(content[key])
        return Manifest(**content)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `dvc repro export` makes it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no exported model: {one_line(error)}") from None


def read_export(folder: Path, precision: str = "") -> ExportedModel:
    """Read an exported model for the backend that JAX has here; raise UserError, one line, if that is impossible.

    With a precision, that of `export.precisions` in place of the training's.
    """
    manifest = read_manifest(folder)
    backend = jax.default_backend()
    name = program_name(PLATFORMS.get(backend, backend), precision)
    if name not in manifest.files:
        reason = "export.precisions of params.yaml adds it" if precision else f"JAX runs on {backend} here"
        raise UserError(f"{folder}: has no {name}; {reason}")
    weights, data = verified_bytes(folder, WEIGHTS_FILE, manifest), verified_bytes(folder, name, manifest)
    try:
        tensors = load(weights)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{folder / WEIGHTS_FILE}: cannot be read: {one_line(error)[:200]}") from None
    try:
        program = export.deserialize(bytearray(data))
        *_, images = program.in_avals
        (answers,) = program.out_avals
    except Exception as error:  # flatbuffers raises any exception for a damaged file
        raise UserError(f"{folder / name}: jax {jax.__version__} cannot read it: {one_line(error)[:200]}") from None
    is_typed = (images.dtype, answers.dtype) == (np.uint8, np.float32)
    outputs = (images.shape[0], len(manifest.classes))
    if not is_typed or (images.shape[1:], answers.shape) != (manifest.image_shape, outputs):
        raise UserError(f"{folder / name}: takes {images} and returns {answers}, which are not those of {MANIFEST}")
    return ExportedModel(manifest, program.call, tensors)


def program_name(platform: str, precision: str = "") -> str:
    """Return the name of the file with the program for a platform, `cpu` or `cuda`, and a precision."""
    return ".".join(["forward", platform, *filter(None, [precision]), "bin"])


def verified_bytes(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Return the bytes of a file of an export; raise UserError if they have another digest than in its manifest."""
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != manifest.files.get(name):
        raise UserError(
            f"{path}: damaged: its SHA-256 is not that of {MANIFEST}; `dvc checkout dvc.yaml` restores models/export"
        )
    return data
