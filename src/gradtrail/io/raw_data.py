"""The data set as `fetch` leaves it in `data/raw`: four IDX files, whatever the data set."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradtrail.io.datasets import DatasetInfo, require_unchanged, sha256
from gradtrail.io.errors import UserError
from gradtrail.io.idx import read_idx

RAW_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, kw_only=True)
class RawData:
    """The four arrays of a raw folder, uint8, in the original order."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def read_raw(folder: Path, info: DatasetInfo) -> RawData:
    """Read the IDX files of a folder that was described; raise UserError where one is not what it was."""
    for name in RAW_FILES:
        require_unchanged(folder / name, info)
    return _read(folder)


def _read(folder: Path) -> RawData:
    """Read the IDX files of a folder; raise UserError where one is damaged or they do not fit together."""
    images, labels, test_images, test_labels = (
        read_idx(folder / name, shape=(None, None, None) if "images" in name else (None,)) for name in RAW_FILES
    )
    for part, length, name in ((images, len(labels), RAW_FILES[0]), (test_images, len(test_labels), RAW_FILES[2])):
        if len(part) != length:
            raise UserError(f"{folder / name}: {len(part)} images, but {length} labels")
    return RawData(images=images, labels=labels, test_images=test_images, test_labels=test_labels)


def describe_raw(folder: Path, name: str) -> DatasetInfo:
    """Describe the IDX files of a folder."""
    raw = _read(folder)
    files = {file: sha256(folder / file) for file in RAW_FILES}
    return DatasetInfo(
        name=name,
        digest=hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        image_shape=(raw.images.shape[1], raw.images.shape[2]),
        num_classes=int(raw.labels.max()) + 1,
        examples={"train": len(raw.labels), "test": len(raw.test_labels)},
        files=files,
    )


def measure_raw(folder: Path, info: DatasetInfo) -> dict[str, float]:
    """Return the metrics of a raw folder."""
    counts = {f"{name}_examples": count for name, count in info.examples.items()}
    return {**counts, "bytes": sum((folder / name).stat().st_size for name in RAW_FILES)}
