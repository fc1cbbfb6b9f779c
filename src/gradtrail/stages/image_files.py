"""Reads image files as a data set: a folder with one folder of images per class, or a CSV file of paths and labels."""

import csv
import hashlib
import itertools
import os
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
from jaxtyping import UInt8

from gradtrail.core.config import Bounds, PositiveShare, Seed, config
from gradtrail.core.data import TEST_SPLIT, stratified_split
from gradtrail.stages.common.params import IMAGE_FILES
from gradtrail.stages.data.data_files import RawArrays
from gradtrail.stages.data.pictures import cropped, read_picture
from gradtrail.support.errors import UserError, printable, redacted
from gradtrail.support.progress import progress_bar

_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
_OTHERS = {".aae", ".csv", ".db", ".html", ".ini", ".json", ".md", ".mov", ".mp4", ".txt", ".xml", ".xmp", ".zip"}
_MAX_CLASSES = 256  # labels are uint8
_MAX_NAME = 100  # characters of the name of a class
_SHOWN, _MOST = 3, 100  # faults of one message; of those that are printed before
_LISTED = 12  # classes of a line
_LEAST_CONTRAST = 16  # smallest difference of the pixels, in a channel, of an image that is not blank
_NEARLY_ALL = 0.9

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
    names, splits = _class_names(splits), in_splits(splits, pictures)
    if missing := set(names) - {name for _, name in splits["train"]}:
        raise UserError(f"class {min(missing)!r} has no training image; each class needs at least one")
    if not splits["test"]:
        raise UserError("there is no test image; at least one is needed")

    shape = (*pictures.size, *((3,) if pictures.color else ()))
    count = sum(map(len, splits.values()))
    arrays, faults, longer, sizes = [], list[str](), list[Path](), list[tuple[int, int]]()
    with progress_bar("images", count, unit="steps") as bar:
        for files in (splits["train"], splits["test"]):
            images = np.empty((len(files), *shape), np.uint8)
            for image, (path, _) in zip(images, files, strict=True):
                try:
                    pixels, has_more_pages = read_picture(path, color=pictures.color)
                    image[:] = cropped(pixels, (pictures.size[0], pictures.size[1]))
                    longer += [path] * has_more_pages
                    sizes.append((pixels.shape[0], pixels.shape[1]))
                except UserError as error:
                    faults.append(f"{path}: {error}")
                bar.advance(1)
            arrays += [images, np.array([names.index(name) for _, name in files], np.uint8)]
    _refuse(sorted(faults), "files that are no usable images", remedy="; convert it to JPEG or PNG, or delete it")
    sides = np.array(sizes)
    report(describe_classes(np.concatenate(arrays[1::2]), names))
    report(
        f"sides of {sides.min():,} to {sides.max():,} pixels, median {np.median(sides):,.0f}; "
        f"{np.sum((sides < pictures.size).any(axis=1)):,} of {count:,} images are enlarged to "
        f"{pictures.size[0]} × {pictures.size[1]} (fetch.pictures.size)"
    )
    if longer:
        report(f"warning: of {len(longer):,} files with several pages or frames the first counts, as of {longer[0]}")
    data = (arrays[0], arrays[1], arrays[2], arrays[3])
    paths = (path for path, _ in splits["train"] + splits["test"])
    warn_of_repeated_and_blank(data, [f"{path.parent.name}/{path.name}" for path in paths])
    return data, names


def in_splits(splits: Splits, pictures: PicturesConfig) -> Splits:
    """Return the files for training and for testing: as they are, or stratified by class if all are in one split."""
    if len(splits) > 1:
        return splits
    (files,) = splits.values()
    _, labels = np.unique([name for _, name in files], return_inverse=True)
    parts = stratified_split(labels, pictures.test_fraction, seed=(pictures.seed, TEST_SPLIT))
    return {name: [files[row] for row in rows] for name, rows in zip(("train", "test"), parts, strict=True)}


def file_table(source: Path, splits: Splits, pictures: PicturesConfig) -> dict[str, list[list[str | int]]]:
    """Return path, class and bytes of each file by split; paths are relative to the folder, or to that of the CSV."""
    folder = source if source.is_dir() else source.parent
    return {
        name: [[printable(os.path.relpath(path, folder)), label, path.stat().st_size] for path, label in files]
        for name, files in in_splits(splits, pictures).items()
    }


def describe_classes(labels: UInt8[np.ndarray, " images"], names: Sequence[str]) -> str:
    """Return the number of images of each class, the smallest first; of many classes not those in the middle."""
    counts = np.bincount(labels, minlength=len(names))
    listed = [f"{names[label]} {counts[label]:,}" for label in np.argsort(counts, kind="stable")]
    if len(listed) > _LISTED:
        listed[_LISTED - 1 : -1] = [f"{len(listed) - _LISTED:,} more"]
    return f"{len(names)} classes, {counts.min():,} to {counts.max():,} images: {', '.join(listed)}"


def report(line: str) -> None:
    """Print a line of `fetch`."""
    print(f"fetch: {printable(redacted(line))}", file=sys.stderr)


def warn_of_repeated_and_blank(arrays: RawArrays, names: Sequence[str]) -> None:
    """Print a line if an image occurs several times, and if nearly all are blank; `names` are those of all images."""
    images, labels, test_images, test_labels = arrays
    digests, num_blank = list[str](), 0
    for image in itertools.chain(images, test_images):
        digests.append(hashlib.sha256(image).hexdigest())
        num_blank += bool((np.ptp(image, axis=(0, 1)) < _LEAST_CONTRAST).all())
    if num_blank > _NEARLY_ALL * len(names):
        report(f"warning: {num_blank:,} of {len(names):,} images are blank: all their pixels are nearly equal")

    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    copies = [(row, copy) for copy, row in enumerate(first[group]) if row < copy]
    if copies:
        in_train, in_test = (np.bincount(part, minlength=len(first)) for part in np.split(group, [len(images)]))
        again = [np.maximum(counts - 1, 0).sum() for counts in (in_train, in_test)]
        all_labels = np.concatenate([labels, test_labels])
        num_labels = np.bincount(np.unique(np.stack([group, all_labels]), axis=1)[0])
        worst = max(copies, key=lambda pair: (np.ptp(all_labels[[*pair]]) > 0, pair[0] < len(images) <= pair[1]))
        report(
            f"warning: identical images: {in_test[in_train > 0].sum():,} of {len(test_images):,} test images are also "
            f"in train; {again[0]:,} train and {again[1]:,} test images repeat another of their split; "
            f"{np.sum(num_labels > 1):,} images have several labels; such as {names[worst[0]]} and {names[worst[1]]}"
        )


def _refuse(faults: Sequence[str], counted: str, prefix: str = "", remedy: str = "") -> None:
    """Raise UserError if there are faults: the only one, or their number and the first few."""
    if len(faults) == 1:
        raise UserError(prefix + faults[0] + remedy)
    if faults:
        for fault in faults[_SHOWN:_MOST]:
            report(fault)
        more = f"; and {len(faults) - _SHOWN:,} more, above" if len(faults) > _SHOWN else ""
        raise UserError(f"{prefix}{len(faults):,} {counted}: {'; '.join(faults[:_SHOWN])}{more}{remedy}")


def _class_names(splits: Splits) -> tuple[str, ...]:
    names = sorted({name for files in splits.values() for _, name in files})
    if not 2 <= len(names) <= _MAX_CLASSES:
        raise UserError(f"classes: 2 to {_MAX_CLASSES} are allowed, found {len(names)}: {_few(names)}")
    for name in names:
        if not name.isprintable() or not 1 <= len(name) <= _MAX_NAME:
            allowed = f"1 to {_MAX_NAME} printable characters are allowed"
            raise UserError(f"the name of class {printable(name[:_MAX_NAME])!r}: {allowed}")
    for one, other in itertools.pairwise(sorted(names, key=str.casefold)):
        if one.casefold() == other.casefold() and len(one) > 1:  # `a` and `A` may be letters
            raise UserError(f"classes {one!r} and {other!r} differ in case alone; give them one name, or two others")
    return tuple(names)


def _normalized(name: str) -> str:
    """Return the name of a class without what cannot be seen: its composition in Unicode, spaces around it."""
    return unicodedata.normalize("NFC", name).strip()


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
        images += [(path, _normalized(class_folder.name)) for path in files]
    return images


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders and the files in a folder, each sorted by name, without hidden ones and what is no picture."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); a folder of images is needed") from None
    files = [path for path in paths if not path.is_dir() and path.suffix.lower() not in _OTHERS]
    return [path for path in paths if path.is_dir()], files


def list_csv(path: Path) -> Splits:
    """List the images of a CSV file with the columns path, relative to the file, label and, if it has one, split."""
    rows = _read_rows(path)
    allowed = ("train", "test") if rows and "split" in rows[0][1] else ("",)
    splits: Splits = {split or "all": [] for split in allowed}
    faults = []
    for line, row in rows:
        name, label, split = row["path"], _normalized(row["label"]), row.get("split", "")
        image = path.parent / name
        if not name or not label:
            faults.append(f"line {line}: path {name!r} and label {label!r}; neither may be empty")
        elif split not in allowed:
            faults.append(f"line {line}: split is {split!r}; allowed are {' and '.join(allowed)}")
        elif not image.is_file():  # a folder and a device are refused too
            faults.append(f"line {line}: {image}: no such file")
        else:
            splits[split or "all"].append((image, label))
    _refuse(faults, "faulty lines", f"{path}: ")
    return splits


def _read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the line and the values by column of each row of a CSV file; rows without a value are left out."""
    rows = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            delimiter = next((mark for mark in ";\t" if mark in header), ",")  # Excel's depends on the language
            columns = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
            if missing := {"path", "label"} - set(columns):
                raise UserError(f"{path}: no column {min(missing)!r}; it needs path and label, and may have split")
            reader = csv.reader(file, delimiter=delimiter)
            for row in reader:
                values, line = [value.strip() for value in row], reader.line_num + 1
                if any(values) and len(values) != len(columns):
                    raise UserError(f"{path}: line {line}: {len(values)} values for {len(columns)} columns")
                rows += [(line, dict(zip(columns, values, strict=True)))] if any(values) else []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); a CSV file is needed") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not readable as CSV in UTF-8: {error}") from None
    return rows


def _few(names: list[str]) -> str:
    return printable(", ".join(names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# By `fetch.dataset`
SOURCES: dict[str, Callable[[Path], Splits]] = dict(zip(IMAGE_FILES, (list_folder, list_csv), strict=True))
