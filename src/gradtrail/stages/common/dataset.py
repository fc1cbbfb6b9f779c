"""The description of a data set, and its splits in `data/processed`."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradtrail.core.data import Split
from gradtrail.stages.common.files import read_json, write_json
from gradtrail.stages.common.params import validate
from gradtrail.support.errors import UserError

SPLITS = ("train", "validation", "test")
DIGEST_LENGTH = 12  # characters of a data set's digest in metrics files and in MLflow
_INFO = "dataset.json"
_UNDEFORMED = "train_undeformed"
INDEX = "index.json"  # of a split in shards, whose digest stands for it


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The description of a data set; it accompanies the data into every metrics file, run and figure.

    Attributes:
        examples: number of examples in each part; if there are deformed versions, also the number of originals.
    """

    name: str  # the value of `fetch.dataset`
    digest: str  # sha256 over the digests of the raw files, hexadecimal
    image_shape: tuple[int, int]  # height and width in pixels
    num_classes: int  # labels are 0 to num_classes - 1
    examples: dict[str, int]
    files: dict[str, str]  # SHA-256 of each file that holds the data, by name

    @property
    def versions(self) -> int:
        """The number of versions of each training example, see `preprocess.deformations`."""
        return self.examples.get("train", 1) // max(1, self.examples.get(_UNDEFORMED, self.examples.get("train", 1)))

    @property
    def label(self) -> str:
        """The name under a figure."""
        return f"{self.name} {self.digest[:8]}"

    def as_metrics(self) -> dict[str, str]:
        """Return the part that goes into every metrics file."""
        return {"dataset": self.name, "dataset_digest": self.digest[:DIGEST_LENGTH]}


def write_info(folder: Path, info: DatasetInfo) -> None:
    """Write the description next to the data."""
    write_json(folder / _INFO, dataclasses.asdict(info))


def read_info(folder: Path) -> DatasetInfo:
    """Read the description next to the data."""
    path = folder / _INFO
    return validate(read_json(path), DatasetInfo, f"{path}: dataset")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_unchanged(path: Path, info: DatasetInfo) -> None:
    """Raise UserError unless a file, or the index of a folder of shards, has the bytes that were described."""
    file = path / INDEX if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; `dvc repro` makes it")
    if sha256(file) != info.files.get(path.name):
        raise UserError(f"{file}: not the bytes that {path.with_name(_INFO)} was written for; `dvc repro` makes both")


def write_split(path: Path, split: Split) -> None:
    """Write a split as an uncompressed `.npz`: `np.load(path)["images"]` reads it back."""
    np.savez(
        path, allow_pickle=False, **{field.name: getattr(split, field.name) for field in dataclasses.fields(split)}
    )


def read_split(path: Path, info: DatasetInfo) -> Split:
    """Read a split; raise UserError if the file is missing or does not have the bytes that were described."""
    require_unchanged(path, info)
    with np.load(path, allow_pickle=False) as arrays:
        return Split(**{field.name: arrays[field.name] for field in dataclasses.fields(Split)})


def write_processed(
    folder: Path,
    splits: Mapping[str, Split],
    info: DatasetInfo,
    *,
    write_train: Callable[[Path], int] | None = None,
    versions: int = 1,
) -> None:
    """Write all splits and the description to a new folder.

    Args:
        folder: the new folder.
        splits: splits by name.
        info: description of the raw data; its files and numbers of examples are replaced.
        write_train: function that writes the training split in shards to a path, in place of `splits["train"]`, and
            returns its size.
        versions: versions of each training example.

    Raises:
        UserError: a split has no example.
    """
    for name, split in splits.items():
        if len(split) == 0:
            raise UserError(
                f"params.yaml: preprocess.validation_fraction leaves no {name} example; found "
                f"{ {part: len(part_split) for part, part_split in splits.items()} }, every split needs at least one"
            )
    folder.mkdir()
    examples = {name: len(split) for name, split in splits.items()}
    for name, split in splits.items():
        path = folder / f"{name}.npz"
        if name == "train" and write_train is not None:
            examples[name] = write_train(path)
        else:
            write_split(path, split)
    if versions > 1:
        examples[_UNDEFORMED] = examples["train"] // versions
    files = {path.name: sha256(path / INDEX if path.is_dir() else path) for path in folder.iterdir()}
    write_info(folder, dataclasses.replace(info, examples=examples, files=files))


def measure_splits(splits: Mapping[str, Split]) -> dict[str, float]:
    """Return metrics of the splits: sizes, wrong and corrected labels, mean and spread of training pixels in 0..1."""
    train = splits["train"]
    return {
        **{f"{name}_examples": len(split) for name, split in splits.items()},
        "noisy_labels": int(np.sum(train.labels != train.true_labels)),
        **{
            f"{name}_corrected_labels": int(np.sum(split.corrected_labels != split.given_labels))
            for name, split in splits.items()
        },
        "pixel_mean": float(np.mean(train.images, dtype=np.float64) / 255),
        "pixel_std": float(np.std(train.images, dtype=np.float64) / 255),
    }
