"""Data on disk: four IDX files in `data/raw`, and an `.npy` for each column of each split in `data/processed`.

Splits are opened as memory maps: a stage reads the rows that it needs, whether or not memory holds all of them.
"""

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from gradtrail.core.data import Split, class_sizes
from gradtrail.stages.common.files import read_json, write_json
from gradtrail.stages.common.params import as_written, validate
from gradtrail.support.errors import UserError

SPLITS = ("train", "validation", "test")
RAW_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
COLUMNS = tuple(field.name for field in dataclasses.fields(Split))
DIGEST_LENGTH = 12  # characters of a data set's digest in metrics files and in MLflow
FILES = "files.json"  # in `data/raw`, if `fetch` read image files: path, class and bytes of each, by split
SAMPLE = 100_000  # most training examples where all are needed at once: learning dynamics, tables

_INFO = "dataset.json"
_IDX_UINT8 = 0x08  # code of the element type
_CHANNELS = (3, 4)  # of an image, as its last axis
_PART = 2**12 * 28 * 28  # pixels that are counted together

RawArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # images and labels for training, then for testing


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The description of a data set; it accompanies the data into every metrics file, run and figure."""

    name: str  # the value of `fetch.dataset`
    digest: str  # SHA-256 over the digests of the raw files, hexadecimal
    image_shape: tuple[int, ...]  # height and width in pixels, in color also the number of channels
    num_classes: int  # labels are 0 to num_classes - 1
    examples: dict[str, int]  # number in each split
    files: dict[str, str]  # SHA-256 of each raw file, by name
    class_names: tuple[str, ...] = ()  # in the order of the labels; empty if the numbers are the names

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class, by default its number."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    @property
    def label(self) -> str:
        """The name under a figure."""
        return f"{self.name} {self.digest[:8]}"

    def as_metrics(self) -> dict[str, str]:
        """Return the part that goes into every metrics file."""
        return {"dataset": self.name, "dataset_digest": self.digest[:DIGEST_LENGTH]}


def write_info(folder: Path, info: DatasetInfo) -> None:
    """Write the description next to the data."""
    write_json(folder / _INFO, as_written(info))


def read_info(folder: Path) -> DatasetInfo:
    """Read the description next to the data."""
    path = folder / _INFO
    return validate(read_json(path), DatasetInfo, f"{path}: dataset")


# Splits


def read_split(folder: Path) -> Split:
    """Open a split, such as `data/processed/train`, as read-only memory maps; raise UserError if a file is missing."""
    try:
        paths = {name: folder / f"{name}.npy" for name in COLUMNS if name != "files" or (folder / "files.npy").exists()}
        return Split(**{name: np.asarray(np.load(path, mmap_mode="r")) for name, path in paths.items()})
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: no such file; `dvc repro` makes it") from None


def read_splits(folder: Path) -> dict[str, Split]:
    """Open all splits of a processed folder."""
    return {name: read_split(folder / name) for name in SPLITS}


def read_samples(folder: Path) -> dict[str, Split]:
    """Open all splits of a processed folder; of a large training split only the rows of `sample_rows`."""
    splits = read_splits(folder)
    rows = sample_rows(len(splits["train"]))
    return {**splits, "train": splits["train"][rows]} if len(rows) < len(splits["train"]) else splits


def sample_rows(num_examples: int) -> Int[np.ndarray, " sample"]:
    """Return ascending positions of all examples, or of `SAMPLE` evenly spaced ones if there are more."""
    count = min(num_examples, SAMPLE)
    return np.arange(count, dtype=np.int64) * num_examples // max(1, count)


def write_processed(folder: Path, splits: Mapping[str, Split], info: DatasetInfo) -> DatasetInfo:
    """Write all splits to a new folder, with the description `info` and the numbers of examples, which is returned.

    Raises UserError if a split has no example.
    """
    sizes = {name: len(split) for name, split in splits.items()}
    if empty := [name for name, size in sizes.items() if not size]:
        raise UserError(
            f"params.yaml: preprocess.validation_fraction leaves no {empty[0]} example; found {sizes}, every split "
            "needs at least one"
        )
    for name, split in splits.items():
        (folder / name).mkdir(parents=True)
        for column, values in vars(split).items():
            if values is not None:
                np.save(folder / name / f"{column}.npy", np.ascontiguousarray(values))
    written = dataclasses.replace(info, examples=sizes)
    write_info(folder, written)
    return written


def with_files(splits: dict[str, Split], raw: Path) -> dict[str, Split]:
    """Return the splits with the path of the image file of each example, if it has one."""
    if not (raw / FILES).exists():
        return splits
    table = read_json(raw / FILES)
    paths = {name: np.array([path for path, *_ in table["test" if name == "test" else "train"]]) for name in splits}
    return {name: dataclasses.replace(split, files=paths[name][split.example_id]) for name, split in splits.items()}


def measure_splits(splits: Mapping[str, Split]) -> dict[str, float]:
    """Return metrics: sizes of splits and classes, wrong and corrected labels, mean and spread of training pixels."""
    train, counts = splits["train"], np.zeros(256, np.int64)  # training pixels of each value
    part = max(1, _PART // math.prod(train.images.shape[1:]))
    for start in range(0, len(train), part):
        counts += np.bincount(train.images[start : start + part].ravel(), minlength=256)
    values = np.arange(256) / 255
    mean = float(np.average(values, weights=counts))
    metrics: dict[str, float] = {"noisy_labels": int(np.sum(train.labels != train.true_labels)), "pixel_mean": mean}
    metrics["smallest_class_examples"], metrics["largest_class_examples"] = class_sizes(train.labels)
    metrics["pixel_std"] = float(np.average((values - mean) ** 2, weights=counts)) ** 0.5
    for name, split in splits.items():
        metrics[f"{name}_examples"] = len(split)
        metrics[f"{name}_corrected_labels"] = int(np.sum(split.corrected_labels != split.given_labels))
    return metrics


# Raw files, in the format in which MNIST was published: a big-endian header, then the bytes of one uint8 array


def encode_idx(array: np.ndarray) -> bytes:
    """Encode an array of uint8 as the bytes of an IDX file."""
    if array.dtype != np.uint8:
        raise ValueError(f"array is {array.dtype}; IDX here is uint8")
    return struct.pack(f">HBB{array.ndim}I", 0, _IDX_UINT8, array.ndim, *array.shape) + array.tobytes()


def read_idx(path: Path, allowed: tuple[int, ...]) -> np.ndarray:
    """Read an IDX file of uint8 as a read-only array.

    Raises:
        UserError: the file is missing, or its header does not declare an allowed number of dimensions and the length of
            the file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); an IDX file is needed") from None
    ndim = data[3] if len(data) > 3 and data[:3] == b"\0\0\x08" and data[3] in allowed else allowed[0]
    header = struct.Struct(f">I{ndim}I")
    if len(data) < header.size:
        raise UserError(f"{path}: only {len(data)} bytes; the header alone has {header.size}")
    magic, *shape = header.unpack_from(data)
    if magic != _IDX_UINT8 << 8 | ndim:
        numbers = " or ".join(f"0x{_IDX_UINT8 << 8 | count:08x}" for count in allowed)
        dimensions = " or ".join(map(str, allowed))
        raise UserError(f"{path}: magic number is 0x{magic:08x}; allowed is {numbers} (uint8, {dimensions} dimensions)")
    if not all(shape):
        raise UserError(f"{path}: header declares sizes {shape}; each must be at least 1")
    if len(data) != (declared := header.size + math.prod(shape)):
        raise UserError(f"{path}: {len(data)} bytes; a header with sizes {shape} needs exactly {declared}")
    return np.frombuffer(data, np.uint8, offset=header.size).reshape(shape)


def read_raw(folder: Path) -> RawArrays:
    """Read the IDX files of a folder; raise UserError if one is damaged or they do not fit together."""
    images, labels, test_images, test_labels = (
        read_idx(folder / name, (3, 4) if "images" in name else (1,)) for name in RAW_FILES
    )
    for part, length, name in ((images, len(labels), RAW_FILES[0]), (test_images, len(test_labels), RAW_FILES[2])):
        if len(part) != length:
            raise UserError(f"{folder / name}: {len(part)} images, but {length} labels")
    if images.shape[1:] != test_images.shape[1:]:
        sizes = f"{test_images.shape[1:]} pixels, but {images.shape[1:]} in {RAW_FILES[0]}"
        raise UserError(f"{folder / RAW_FILES[2]}: images of {sizes}")
    return images, labels, test_images, test_labels


def describe_raw(folder: Path, name: str, class_names: tuple[str, ...] = ()) -> DatasetInfo:
    """Describe the IDX files of a folder; raise UserError if they are damaged, or hold a single class."""
    images, labels, _, test_labels = read_raw(folder)
    if images.ndim == 4 and images.shape[3] not in _CHANNELS:
        allowed = "3 or 4 are allowed, or three dimensions for grayscale images"
        raise UserError(f"{folder / RAW_FILES[0]}: {images.shape[3]} channels as the fourth dimension; {allowed}")
    num_classes = len(class_names) or int(max(labels.max(), test_labels.max())) + 1
    if num_classes < 2:
        raise UserError(f"{folder / RAW_FILES[1]}: every label is 0; at least 2 classes are needed")
    files = {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in RAW_FILES}
    return DatasetInfo(
        name=name,
        digest=hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        image_shape=images.shape[1:],
        num_classes=num_classes,
        examples={"train": len(labels), "test": len(test_labels)},
        files=files,
        class_names=class_names,
    )


def measure_raw(folder: Path, info: DatasetInfo) -> dict[str, float]:
    """Return the metrics of a raw folder."""
    counts = {f"{name}_examples": count for name, count in info.examples.items()}
    return {**counts, "bytes": sum((folder / name).stat().st_size for name in RAW_FILES)}
