"""Reads image files as a data set: a folder with one folder of images per class, or a CSV file of paths and labels."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np

from gradtrail.core.config import Bounds, PositiveShare, Seed, config
from gradtrail.core.data import TEST_SPLIT, stratified_split
from gradtrail.stages.artifacts.data_files import RawArrays
from gradtrail.stages.artifacts.pictures import cropped, read_pixels
from gradtrail.stages.common.params import IMAGE_FILES
from gradtrail.support.errors import UserError, printable
from gradtrail.support.progress import progress_bar

_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
_MAX_CLASSES = 256  # labels are uint8
_MAX_NAME = 100  # characters of the name of a class
_MAX_BYTES = 2**32  # of all pixels, which are in memory together

Splits: TypeAlias = dict[str, list[tuple[Path, str]]]  # file and class of each image, by split; one split if it is open


@config
class PicturesConfig:
    """The block `fetch.pictures` of `params.yaml`."""

    size: tuple[Annotated[int, Bounds(at_least=4, at_most=1024)], ...]  # height and width in pixels
    color: bool  # True for RGB, False for brightness
    test_fraction: PositiveShare  # share of each class that is the test split, if the source has no split
    seed: Seed  # seed of that split

    def check(self) -> None:
        """Refuse a size that is not two numbers."""
        if len(self.size) != 2:
            raise ValueError(f"size must be a height and a width, such as [32, 32]; got {list(self.size)}")


def read_images(splits: Splits, pictures: PicturesConfig) -> tuple[RawArrays, tuple[str, ...]]:
    """Return images and labels for training, then for testing, and the names of the classes in order.

    Each image is cropped at its centre to the proportions of `pictures.size`, then resized.

    Raises:
        UserError: one line: a file is damaged, or the classes or their numbers of images do not fit.
    """
    names = _class_names(splits)
    if len(splits) == 1:
        (files,) = splits.values()
        labels = np.array([names.index(name) for _, name in files])
        parts = stratified_split(labels, pictures.test_fraction, seed=(pictures.seed, TEST_SPLIT))
        splits = {name: [files[row] for row in rows] for name, rows in zip(("train", "test"), parts, strict=True)}
    if missing := set(names) - {name for _, name in splits["train"]}:
        raise UserError(f"class {min(missing)!r} has no training image; each class needs at least one")
    if not splits["test"]:
        raise UserError("there is no test image; at least one is needed")

    shape = (*pictures.size, *((3,) if pictures.color else ()))
    count = sum(map(len, splits.values()))
    if (size := count * math.prod(shape)) > _MAX_BYTES:
        raise UserError(
            f"{count:,} images of fetch.pictures.size {list(pictures.size)} have {size:,} bytes; at most "
            f"{_MAX_BYTES:,} are allowed"
        )
    arrays = []
    with progress_bar("images", count, unit="steps") as bar:
        for files in (splits["train"], splits["test"]):
            images = np.empty((len(files), *shape), np.uint8)
            for image, (path, _) in zip(images, files, strict=True):
                image[:] = _read_image(path, pictures)
                bar.advance(1)
            arrays += [images, np.array([names.index(name) for _, name in files], np.uint8)]
    return (arrays[0], arrays[1], arrays[2], arrays[3]), names


def _class_names(splits: Splits) -> tuple[str, ...]:
    names = sorted({name for files in splits.values() for _, name in files})
    if not 2 <= len(names) <= _MAX_CLASSES:
        raise UserError(f"classes: 2 to {_MAX_CLASSES} are allowed, found {len(names)}: {_few(names)}")
    for name in names:
        if not name.isprintable() or len(name) > _MAX_NAME:
            allowed = f"up to {_MAX_NAME} printable characters are allowed"
            raise UserError(f"the name of class {printable(name[:_MAX_NAME])!r}: {allowed}")
    return tuple(names)


def _read_image(path: Path, pictures: PicturesConfig) -> np.ndarray:
    try:
        return cropped(read_pixels(path, color=pictures.color), (pictures.size[0], pictures.size[1]))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


# Sources: the files and classes of each split


def list_folder(folder: Path) -> Splits:
    """List `<class>/*`, or `train/<class>/*` and `test/<class>/*`; hidden files and folders are left out."""
    folders, files = _entries(folder)
    if images := [path.name for path in files if path.suffix.lower() in _SUFFIXES]:
        raise UserError(f"{folder}: {_few(images)}: each image must be in the folder of its class")
    if not {"train", "test"} & {path.name for path in folders}:
        return {"all": _list_classes(folder)}
    if (names := [path.name for path in folders]) != ["test", "train"]:
        raise UserError(
            f"{folder}: it has the folders {_few(names)}; allowed are train and test, or one folder per class"
        )
    splits = {name: _list_classes(folder / name) for name in ("train", "test")}
    for name in sorted({name for _, name in splits["test"]} - {name for _, name in splits["train"]}):
        raise UserError(f"{folder / 'test' / name}: there is no class {name!r} in train")
    return splits


def _list_classes(folder: Path) -> list[tuple[Path, str]]:
    images = []
    for class_folder in _entries(folder)[0]:
        folders, files = _entries(class_folder)
        if folders:
            raise UserError(f"{folders[0]}: a folder in the folder of a class; images must be in {class_folder} itself")
        if not files:
            raise UserError(f"{class_folder}: no image; delete the folder, or add images of the class")
        images += [(path, class_folder.name) for path in files]
    return images


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders and the files in a folder, each sorted by name, without hidden ones."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); a folder of images is needed") from None
    return [path for path in paths if path.is_dir()], [path for path in paths if not path.is_dir()]


def list_csv(path: Path) -> Splits:
    """List the images of a CSV file with the columns path, relative to the file, label and, if it has one, split."""
    rows = _read_rows(path)
    allowed = ("train", "test") if rows and "split" in rows[0][1] else ("",)
    splits: Splits = {split or "all": [] for split in allowed}
    for line, row in rows:
        name, label, split = row["path"], row["label"], row.get("split", "")
        if not name or not label:
            raise UserError(f"{path}: line {line}: path {name!r} and label {label!r}; neither may be empty")
        if split not in allowed:
            raise UserError(f"{path}: line {line}: split is {split!r}; allowed are {' and '.join(allowed)}")
        if not (image := path.parent / name).is_file():  # a folder and a device are refused too
            raise UserError(f"{path}: line {line}: {image}: no such file")
        splits[split or "all"].append((image, label))
    return splits


def _read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the line and the values by column of each row of a CSV file."""
    line = 1
    rows = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            columns = [name.strip() for name in next(reader, [])]
            if missing := {"path", "label"} - set(columns):
                raise UserError(f"{path}: no column {min(missing)!r}; it needs path and label, and may have split")
            for row in reader:
                line = reader.line_num
                if row and len(row) != len(columns):
                    raise UserError(f"{path}: line {line}: {len(row)} values for {len(columns)} columns")
                rows += [(line, dict(zip(columns, map(str.strip, row), strict=True)))] if row else []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); a CSV file is needed") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path}: after line {line}: not readable as CSV: {error}") from None
    return rows


def _few(names: list[str]) -> str:
    return printable(", ".join(names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# By `fetch.dataset`
SOURCES: dict[str, Callable[[Path], Splits]] = dict(zip(IMAGE_FILES, (list_folder, list_csv), strict=True))
