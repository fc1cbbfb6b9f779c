"""Folders and CSV files of images become arrays; a file or a class that does not fit is one line that names it."""

import csv
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import preprocess_config
from fuzzing import damaged, fuzz, refusal
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gradtrail.core.data import prepare
from gradtrail.core.train.changes import NO_CHANGES, changed_labels
from gradtrail.stages import image_files
from gradtrail.stages.image_files import SOURCES, PicturesConfig, Splits, list_csv, list_folder, read_images

PICTURES = PicturesConfig(size=(8, 6), color=True, test_fraction=0.25, seed=0)
GREY = dataclasses.replace(PICTURES, color=False)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 18\n"


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_class(folder: Path, count: int, *, seed: int = 0, shape: tuple[int, ...] = (8, 6, 3)) -> None:
    folder.mkdir(parents=True)
    for index in range(count):
        Image.fromarray(noise(seed + index, *shape)).save(folder / f"{index:03}.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of eight images, with the files that systems and people add."""
    root = tmp_path / "images"
    for seed, name in enumerate(("owl", "cat")):
        write_class(root / name, 8, seed=100 * seed)
        for other in (".DS_Store", "Thumbs.db", "notes.TXT"):
            (root / name / other).write_bytes(b"\0")
    (root / ".git").mkdir()
    (root / "README.txt").write_text("no image")
    return root


def write_csv(path: Path, *rows: tuple[str, ...]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


# Pixels


def test_images_of_the_size_are_unchanged_and_split_by_class_and_seed(folder: Path) -> None:
    (images, labels, test_images, test_labels), names = read_images(list_folder(folder), PICTURES)
    assert names == ("cat", "owl")
    assert np.bincount(labels).tolist() == [6, 6]
    assert np.bincount(test_labels).tolist() == [2, 2]
    written = {noise(100 + index, 8, 6, 3).tobytes() for index in range(8)}
    assert {image.tobytes() for image in [*images[labels == 0], *test_images[test_labels == 0]]} == written
    for array, again in zip((images, labels), read_images(list_folder(folder), PICTURES)[0], strict=False):
        np.testing.assert_array_equal(array, again)
    other = read_images(list_folder(folder), dataclasses.replace(PICTURES, seed=1))[0]
    assert not np.array_equal(other[0], images)


def test_equal_seeds_of_different_purposes_draw_different_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the test split, the validation split, the subset, the noise, and the examples that a training omits."""
    streams, default_rng = list[bytes](), np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: streams.append(first_bits(seed)) or default_rng(seed))

    def first_bits(seed: Any) -> bytes:
        return np.random.SeedSequence(seed).generate_state(4).tobytes()

    arrays, _ = read_images(list_folder(folder), PICTURES)
    train = prepare(*arrays, preprocess_config(subset_fraction=0.5, label_noise=0.5), num_classes=2)["train"]
    changed_labels(dataclasses.replace(NO_CHANGES, omit_fraction=0.5), train.labels, train.example_id, 2)
    assert len({*streams}) == 5 < len(streams), "each split has a subset"


def test_other_proportions_are_cropped_at_the_centre(tmp_path: Path) -> None:
    """The edges that the crop removes are red; a large image is averaged, not sampled."""
    for name, rows, columns in (("tall", 400, 60), ("wide", 80, 300)):
        pixels = np.full((rows, columns, 3), (255, 0, 0), np.uint8)
        height, width = (80, 60)
        top, left = (rows - height) // 2, (columns - width) // 2
        pixels[top : top + height, left : left + width] = np.indices((height, width)).sum(axis=0)[..., None] % 2 * 254
        (tmp_path / name).mkdir()
        for index in range(2):
            Image.fromarray(pixels).save(tmp_path / name / f"{index}.png")
    images = read_images(list_folder(tmp_path), dataclasses.replace(PICTURES, test_fraction=0.5))[0][0]
    assert images.shape == (2, 8, 6, 3)
    assert np.abs(images.astype(int) - 127).max() <= 16  # the filter reaches over the edge


def test_every_format_is_read_in_color_and_in_grey(tmp_path: Path) -> None:
    """White is 255, and grey that of ITU-R 601: 0.114 of 255 for blue."""
    for name, value in (("blue", (0, 0, 255)), ("white", (255, 255, 255))):
        (tmp_path / name).mkdir()
        for suffix in ("png", "jpg", "jpeg", "webp", "PNG", "bmp"):
            Image.new("RGB", (30, 40), value).save(tmp_path / name / f"{suffix}.{suffix}")
    for pictures, blue in ((PICTURES, [0, 0, 255]), (GREY, 29)):
        images, labels, *_ = read_images(list_folder(tmp_path), dataclasses.replace(pictures, test_fraction=0.1))[0]
        assert images.shape == (11, 8, 6, *np.shape(blue))
        assert np.abs(images[labels == 0] - np.array(blue)).max() <= 2
        assert (images[labels == 1] == 255).all()


def test_orientation_of_a_camera_is_applied_and_transparent_parts_are_white(tmp_path: Path) -> None:
    upright = np.zeros((8, 6), np.uint8)
    upright[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    (tmp_path / "a").mkdir()
    Image.fromarray(np.rot90(upright)).save(tmp_path / "a" / "turned.png", exif=exif)
    (tmp_path / "b").mkdir()
    Image.new("RGBA", (6, 8), (0, 0, 0, 0)).save(tmp_path / "b" / "clear.png")
    files = [(tmp_path / "a/turned.png", "a"), (tmp_path / "b/clear.png", "b")]
    (images, *_), _ = read_images({"train": files, "test": files}, GREY)
    np.testing.assert_array_equal(images[0], upright)
    assert (images[1] == 255).all()


# Layouts


def test_train_and_test_are_kept_apart(tmp_path: Path) -> None:
    for seed, (split, count) in enumerate((("train", 5), ("test", 2))):
        for name in ("cat", "owl"):
            write_class(tmp_path / split / name, count, seed=10 * seed)
    (images, labels, test_images, test_labels), names = read_images(list_folder(tmp_path), PICTURES)
    assert (names, labels.tolist(), test_labels.tolist()) == (("cat", "owl"), [0] * 5 + [1] * 5, [0, 0, 1, 1])
    np.testing.assert_array_equal(images[0], noise(0, 8, 6, 3))
    np.testing.assert_array_equal(test_images[0], noise(10, 8, 6, 3))


def test_csv_names_files_relative_to_itself(folder: Path) -> None:
    rows = [(f" {name}/00{index}.png", f" {name} ", "x") for name in ("cat", "owl") for index in range(8)]
    path = write_csv(folder / "list.csv", ("path", "label", "photographer"), *rows, ())
    arrays, names = read_images(list_csv(path), PICTURES)
    expected, expected_names = read_images(list_folder(folder), PICTURES)
    assert names == expected_names
    for array, other in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, other)


CSV_FORMS: dict[str, bytes] = {
    "semicolons": b"path;label;photographer\nowl/000.png;owl;x, y\ncat/000.png;cat;\n",
    "tabs": b"label\tpath\nowl\towl/000.png\ncat\tcat/000.png\n",
    "quotes": b'"path";"label"\n"owl/000.png";"owl"\n"cat/000.png";" cat"\n',
    "empty rows and columns": b"path,label,,\nowl/000.png,owl,,\n,,,\n\ncat/000.png,cat,,\n,\n , ,\n",
}


@pytest.mark.parametrize("form", CSV_FORMS)
def test_csv_is_read_as_spreadsheets_write_it(folder: Path, form: str) -> None:
    (folder / "list.csv").write_bytes(b"\xef\xbb\xbf" + CSV_FORMS[form])
    files = [(folder / f"{name}/000.png", name) for name in ("owl", "cat")]
    assert list_csv(folder / "list.csv") == {"all": files}


def test_names_that_look_alike_are_one_class(tmp_path: Path) -> None:
    """Of two letters that differ in case each is a class."""
    for seed, name in enumerate(("caf\u00e9", "cafe\u0301", " caf\u00e9 ", "a", "A")):
        write_class(tmp_path / name, 4, seed=10 * seed)
    rows = [("path", "label"), *(("a/000.png", name) for name in ("cafe\u0301", " caf\u00e9 ", "a", "A"))]
    for splits in (list_folder(tmp_path), list_csv(write_csv(tmp_path / "list.csv", *rows))):
        assert {name for _, name in splits["all"]} == {"caf\u00e9", "a", "A"}
        assert read_images(splits, PICTURES)[1] == ("A", "a", "caf\u00e9")


def test_only_image_of_a_class_is_for_training(folder: Path) -> None:
    remove("owl", keep=1)(folder)
    (_, labels, _, test_labels), _ = read_images(list_folder(folder), dataclasses.replace(PICTURES, test_fraction=0.9))
    assert (np.sum(labels == 1), np.sum(test_labels == 1), np.sum(test_labels == 0)) == (1, 0, 7)


# Warnings


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=2, max_size=12), st.integers(1, 11))
def test_repeated_images_are_counted(pairs: list[tuple[int, int]], cut: int) -> None:
    """The pairs are an image and its label."""
    cut, lines = min(cut, len(pairs) - 1), list[str]()
    kinds, labels = (np.array(values, np.uint8) for values in zip(*pairs, strict=True))
    images = np.stack([noise(kind, 4, 4) for kind in kinds])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_files, "report", lines.append)
        arrays = images[:cut], labels[:cut], images[cut:], labels[cut:]
        image_files.warn_of_repeated_and_blank(arrays, [f"n{row}" for row in range(len(pairs))])
    train, test = kinds[:cut].tolist(), kinds[cut:].tolist()
    both, again = sum(kind in train for kind in test), [len(part) - len(set(part)) for part in (train, test)]
    several = sum(len({label for other, label in pairs if other == kind}) > 1 for kind in set(kinds.tolist()))
    assert len(lines) == (len(set(kinds.tolist())) < len(pairs))
    for line in lines:
        counts = f"{both} of {len(test)} test images are also in train; {again[0]} train and {again[1]} test images "
        assert line.startswith(
            f"warning: identical images: {counts}repeat another of their split; {several} images have "
        )
        one, other = re.findall(r"\bn(\d+)", line)
        assert kinds[int(one)] == kinds[int(other)]
        assert (labels[int(one)] != labels[int(other)]) == (several > 0)


def test_blank_images_and_further_pages_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "owl"):
        write_class(tmp_path / name, 2, seed=len(name) + ord(name[0]))
    pages = [Image.fromarray(noise(seed, 8, 6, 3)) for seed in range(3)]
    for place, suffix in (("cat/2", "tif"), ("owl/2", "png"), ("owl/3", "webp")):
        pages[0].save(tmp_path / f"{place}.{suffix}", save_all=True, append_images=pages[1:], lossless=True)
        pages = pages[1:] + pages[:1]
    pages[0].save(tmp_path / "cat/3.jpg", "MPO", save_all=True, append_images=pages[1:])  # a preview is no page
    read_images(list_folder(tmp_path), PICTURES)
    [*_, line] = capsys.readouterr().err.splitlines()
    told = r"of 3 files with several pages or frames the first counts, as of .*/(cat/2.tif|owl/[23].(png|webp))"
    assert re.match(f"fetch: warning: {told}$", line)

    for number in range(80):
        Image.new("L", (6, 8), 3 * number).save(tmp_path / "cat" / f"dark{number}.png")
    read_images(list_folder(tmp_path), PICTURES)
    assert capsys.readouterr().err.splitlines()[3:] == [
        "fetch: warning: 80 of 88 images are blank: all their pixels are nearly equal"
    ]


def test_sizes_of_files_and_of_classes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An image that is too narrow or too low is enlarged; what is larger is not."""
    for name, shape in (("cat", (8, 6, 3)), ("dog", (7, 60, 3)), ("owl", (80, 5, 3)), ("yak", (80, 60, 3))):
        write_class(tmp_path / name, 2, seed=ord(name[0]), shape=shape)
    read_images(list_folder(tmp_path), PICTURES)
    told = "sides of 5 to 80 pixels, median 34; 4 of 8 images are enlarged to 8 × 6 (fetch.pictures.size)"
    assert capsys.readouterr().err == f"fetch: 4 classes, 2 to 2 images: cat 2, dog 2, owl 2, yak 2\nfetch: {told}\n"

    labels = np.repeat(np.arange(15, dtype=np.uint8), [9, *range(10, 24)])
    few = image_files.describe_classes(labels[labels < 3], ["cat", "dog", "owl"])
    assert few == "3 classes, 9 to 11 images: cat 9, dog 10, owl 11"
    many = image_files.describe_classes(labels[::-1], [f"c{label}" for label in range(15)])
    assert many.startswith("15 classes, 9 to 23 images: c0 9, c1 10, ")
    assert many.endswith(", c10 19, 3 more, c14 23")


# Faults


def add(path: str, data: bytes = b"") -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)

    return write


def remove(name: str, keep: int = 0) -> Callable[[Path], None]:
    def delete(root: Path) -> None:
        for path in sorted((root / name).iterdir(), key=lambda path: path.suffix == ".png")[: -keep or None]:
            path.unlink()
        if not keep:
            (root / name).rmdir()

    return delete


def with_test_only(root: Path) -> None:
    for place in ("train/cat", "train/owl", "test/cat", "test/dog"):
        write_class(root / place, 1)
    for name in ("cat", "owl"):
        remove(name)(root)


NO_IMAGE = "not a readable image: none of PNG, JPEG, BMP, TIFF, WEBP"
FOLDER_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "damaged": (add("cat/009.png", b"\x89PNG\r\n\x1a\n..."), "cat/009.png: not a readable image"),
    "many damaged": (
        lambda root: [add(f"cat/x{number:02}.png", b"?")(root) for number in range(50)] and None,
        "50 files that are no usable images: "
        + "".join(f"{{0}}/cat/x0{number}.png: {NO_IMAGE}; " for number in range(3))
        + "and 47 more, above; convert it to JPEG or PNG, or delete it",
    ),
    "pipe": (lambda root: os.mkfifo(root / "cat/pipe.png"), "cat/pipe.png: not a file but a folder, pipe or device"),
    "pointer of Git LFS": (add("cat/x.png", LFS_POINTER), "cat/x.png: a Git LFS pointer, not the file itself; `git"),
    "names that differ in case": (
        lambda root: write_class(root / "Owl", 2),
        "classes 'Owl' and 'owl' differ in case alone; give them one name, or two others",
    ),
    "name of spaces": (lambda root: write_class(root / "  ", 2), "the name of class '': 1 to 100 printable"),
    "no image": (add("cat/1.HEIC", b"hello"), f"cat/1.HEIC: {NO_IMAGE}; convert it to JPEG or PNG, or delete it"),
    "empty class": (
        add("dog/Thumbs.db"),
        "dog: no image; delete the folder, or add images of the class",
    ),
    "folder in a class": (lambda root: (root / "cat/more").mkdir(), "cat/more: a folder in the folder of a class"),
    "one class": (remove("owl"), "classes: 2 to 256 are allowed, found 1: cat"),
    "image without a class": (add("stray.JPG"), "stray.JPG: each image must be in the folder of its class"),
    "no test": (
        lambda root: (root / "train").mkdir(),
        "it has the folders cat, owl, train; allowed are train",
    ),
    "class that train lacks": (with_test_only, "test/dog: there is no class 'dog' in train"),
    "line break in a name": (lambda root: write_class(root / "do\ng", 4), r"'do\ng': 1 to 100 printable"),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_fault_of_a_folder_is_named_in_one_line(folder: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, message = FOLDER_FAULTS[fault]
    spoil(folder)
    line = refusal(lambda: read_images(list_folder(folder), PICTURES))
    assert message.format(folder) in str(line)
    printed = [f"fetch: {folder}/cat/x{number:02}.png: {NO_IMAGE}" for number in range(3, 50)]
    assert capsys.readouterr().err.splitlines() == printed * (fault == "many damaged")


CSV_FAULTS: dict[str, tuple[bytes, str]] = {
    "no column": (b"file,label\n", "list.csv: no column 'path'; it needs path and label"),
    "empty file": (b"", "list.csv: no column 'label'"),
    "no rows": (b"path,label\n", "classes: 2 to 256 are allowed, found 0"),
    "many faults": (
        b"path,label,split\n" + b"cat/x.png,cat,\n" * 9 + b"cat/000.png,,\n,cat,train\n",
        "list.csv: 11 faulty lines: line 2: split is ''; allowed are train and test; line 3: split is ''; allowed are "
        "train and test; line 4: split is ''; allowed are train and test; and 8 more, above",
    ),
    "class without training": (
        b"path,label,split\ncat/000.png,cat,train\nowl/000.png,owl,test\n",
        "class 'owl' has no training image",
    ),
    "no label": (b"path,label\ncat/000.png,\n", "list.csv: line 2: path 'cat/000.png' and label ''"),
    "a device": (b"path,label\n/dev/zero,cat\n", "line 2: /dev/zero: no such file"),
    "a comma more": (b"path,label\ncat/000.png,cat,\n", "line 2: 3 values for 2 columns"),
    "UTF-16": ("path,label\n".encode("utf-16"), "list.csv: not readable as CSV in UTF-8: "),
}


@pytest.mark.parametrize("fault", CSV_FAULTS)
def test_fault_of_a_csv_file_is_named_in_one_line(folder: Path, fault: str) -> None:
    data, message = CSV_FAULTS[fault]
    (folder / "list.csv").write_bytes(data)
    assert message in str(refusal(lambda: read_images(list_csv(folder / "list.csv"), PICTURES)))


@pytest.mark.parametrize("source", SOURCES)
def test_missing_source_is_one_line(tmp_path: Path, source: str) -> None:
    assert "nowhere: cannot be read (No such file or directory)" in str(
        refusal(lambda: SOURCES[source](tmp_path / "nowhere"))
    )


def test_too_many_classes_are_refused(folder: Path) -> None:
    many: Splits = {"all": [(folder, f"{number:03}") for number in range(257)]}
    assert "found 257: 000, 001, 002, 003, 004 and 252 more" in str(refusal(lambda: read_images(many, PICTURES)))


@fuzz(60)
@given(st.data())
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "a").mkdir(exist_ok=True)
    Image.fromarray(noise(0, 8, 6, 3)).save(path := tmp_path / "a" / "x.png")
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    text = b"path,label,split\na/x.png,a,train\na/x.png,b,train\na/x.png,a,test\n"
    (tmp_path / "list.csv").write_bytes(data.draw(st.one_of(st.just(text), damaged(text))))
    refusal(lambda: read_images(list_csv(tmp_path / "list.csv"), PICTURES))
