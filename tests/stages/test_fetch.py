"""Each source of a data set delivers the same four verified files; the order of the sources, and their absence.

Most tests let a dozen random images stand for MNIST, under its name.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import socket
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets  # type: ignore[import-untyped]
from bad_http_server import Handler, MirrorServer, Route, endless, mirror_server, status, whole
from factories import ROOT
from fuzzing import damaged, fuzz
from hypothesis import given
from PIL import Image

from gradtrail.stages import fetch
from gradtrail.stages.common.environment import RuntimeConfig
from gradtrail.stages.common.params import load_section
from gradtrail.stages.data.data_files import RAW_FILES, DatasetInfo, RawArrays, encode_idx, read_info, write_info
from gradtrail.stages.datasets import DATASETS
from gradtrail.stages.fetch import FetchConfig, KnownFile, SourceError, acquire, require_url
from gradtrail.support.errors import NO_SOURCE_FLAG, NoSourceError, UserError

RUNTIME = load_section("runtime", RuntimeConfig, ROOT / "params.yaml")
FETCH = load_section("fetch", FetchConfig, ROOT / "params.yaml")


def random_arrays(shape: tuple[int, ...] = (28, 28), num_classes: int = 10) -> RawArrays:
    generator = np.random.default_rng(0)
    images, test_images = (generator.integers(0, 256, (count, *shape), dtype=np.uint8) for count in (20, 10))
    labels, test_labels = (np.arange(count, dtype=np.uint8) % num_classes for count in (20, 10))
    return images, labels, test_images, test_labels


def as_files(arrays: RawArrays) -> dict[str, bytes]:
    return {name: encode_idx(array) for name, array in zip(RAW_FILES, arrays, strict=True)}


SMALL = as_files(random_arrays())
DIGESTS = tuple(hashlib.sha256(data).hexdigest() for data in SMALL.values())
LAST = RAW_FILES[3]
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 18\n"


def serve_openml(server: MirrorServer, arrays: RawArrays) -> None:
    """Serve what OpenML's API answers for mnist_784: pixels are numeric columns, labels a nominal one."""
    images, labels = np.concatenate(arrays[::2]), np.concatenate(arrays[1::2])
    pixels = [f"pixel{place + 1}" for place in range(784)]
    lines = ["@RELATION mnist_784", *(f"@ATTRIBUTE {pixel} real" for pixel in pixels)]
    lines += ["@ATTRIBUTE class {0,1,2,3,4,5,6,7,8,9}", "@DATA"]
    rows = zip(images.reshape(-1, 784).tolist(), labels.tolist(), strict=True)
    arff = "\n".join([*lines, *(",".join(map(str, [*row, label])) for row, label in rows), ""]).encode()
    flags = {"is_ignore": "false", "is_row_identifier": "false", "number_of_missing_values": "0"}
    features = [{"name": pixel, "data_type": "numeric", "is_target": "false", **flags} for pixel in pixels]
    features.append({"name": "class", "data_type": "nominal", "is_target": "true", **flags})
    description = {"name": "mnist_784", "version": "1", "status": "active", "format": "ARFF", "description": ""}
    description |= {"url": f"{server.base()}/download", "md5_checksum": hashlib.md5(arff).hexdigest()}  # noqa: S324
    answers = {
        "/_SEARCH_NAME/mnist_784/data_version/1": {"data": {"dataset": [{"did": 554, "version": 1}]}},
        "/_DATA_INFO/554": {"data_set_description": description},
        "/_DATA_FEATURES/554": {"data_features": {"feature": features}},
        "/_DATA_QUALITIES/554": {"data_qualities": {"quality": [{"name": "NumberOfInstances", "value": "30"}]}},
    }
    server.routes |= {path: whole(json.dumps(content).encode()) for path, content in answers.items()}
    server.routes |= {"/download": whole(arff), "": whole(b"OpenML")}


def write_folder(folder: Path, files: dict[str, bytes] = SMALL, *, gzipped: bool = False) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / (name + ".gz" * gzipped)).write_bytes(gzip.compress(data) if gzipped else data)
    return folder


class Acquisition:
    """Calls `acquire`, by default with no mirror and without OpenML; stderr is what was reported."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.to, self._capsys = folder / "to", capsys
        self.to.mkdir()

    def acquire(
        self, dataset: str = "mnist", *, mirrors: tuple[str, ...] | None = (), openml: bool = False
    ) -> DatasetInfo:
        runtime = dataclasses.replace(RUNTIME, mirrors=mirrors, openml=openml)
        return acquire(dataclasses.replace(FETCH, dataset=dataset), self.to, runtime)

    def refusal(self, dataset: str = "mnist", **sources: object) -> str:
        with pytest.raises(UserError) as error:
            self.acquire(dataset, **sources)  # type: ignore[arg-type]
        return str(error.value)

    def reports(self) -> list[str]:
        lines = self._capsys.readouterr().err.splitlines()
        assert all(line.startswith("fetch: ") for line in lines)
        return [line.removeprefix("fetch: ") for line in lines]

    def written(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.to.iterdir()}


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> Iterator[MirrorServer]:
    """A server at which scikit-learn finds OpenML, which holds the small files."""
    from sklearn.datasets import _openml  # type: ignore[import-untyped] # late: it takes seconds

    with mirror_server() as server:
        monkeypatch.setattr(fetch, "OPENML_URL", server.base())
        for constant in ("_SEARCH_NAME", "_DATA_INFO", "_DATA_FEATURES", "_DATA_QUALITIES"):
            monkeypatch.setattr(_openml, constant, f"{server.base()}/{constant}/{{}}")
        serve_openml(server, random_arrays())
        yield server


@pytest.fixture
def acquisition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Acquisition:
    """Let nothing of the environment say where data are, and the small files be what MNIST and Fashion-MNIST are."""
    variables = [entry.folder_variable for entry in DATASETS.values() if entry.folder_variable]
    for name in (*variables, "http_proxy", "https_proxy", "all_proxy", NO_SOURCE_FLAG):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("mnist", "fashion_mnist"):
        entry = dataclasses.replace(DATASETS[name], num_train=20, num_test=10, sha256=DIGESTS)  # type: ignore[arg-type]
        monkeypatch.setitem(DATASETS, name, entry)
    return Acquisition(tmp_path, capsys)


def serve_mirror(internet: MirrorServer, route: str, files: dict[str, bytes]) -> str:
    internet.routes |= {f"/{route}/{name}.gz": whole(gzip.compress(data)) for name, data in files.items()}
    return internet.base(route)


# From a folder.


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize(("dataset", "variable"), [("mnist", "MNIST_DIR"), ("fashion_mnist", "FASHION_MNIST_DIR")])
def test_folder_comes_first(
    acquisition: Acquisition,
    internet: MirrorServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: str,
    variable: str,
    *,
    gzipped: bool,
) -> None:
    monkeypatch.setenv(variable, str(write_folder(tmp_path / "folder", gzipped=gzipped)))
    info = acquisition.acquire(dataset, mirrors=(internet.base(),), openml=True)
    assert acquisition.written() == SMALL
    assert (info.name, info.image_shape, info.num_classes) == (dataset, (28, 28), 10)
    entry = DATASETS[dataset]
    assert acquisition.reports() == [f"{entry.title} from {tmp_path / 'folder'}; cite {entry.citation}"]
    assert internet.requests == []


FAULTS: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("", None, f"there is neither {LAST} nor {LAST}.gz"),
    "other bytes": ("", SMALL[LAST][:-1] + b"?", "SHA-256 of its 18 bytes is "),
    "truncated": ("", SMALL[LAST][:-1], "SHA-256 of its 17 bytes is "),
    "too long": ("", SMALL[LAST] + b"x", "more than 18 bytes"),
    "no gzip": (".gz", SMALL[LAST], "no valid gzip"),
    "pointer of Git LFS": (".gz", LFS_POINTER, "a Git LFS pointer, not the file itself; `git lfs pull` fetches it"),
    "truncated gzip": (".gz", gzip.compress(SMALL[LAST])[:-1], "no valid gzip"),
    "gzip bomb": (".gz", gzip.compress(bytes(1 << 24)), "more than 18 bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_folder_is_reported_and_next_source_is_used(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    suffix, data, reason = FAULTS[fault]
    folder = write_folder(tmp_path / "folder")
    (folder / LAST).unlink()
    if data is not None:
        (folder / (LAST + suffix)).write_bytes(data)
    monkeypatch.setenv("MNIST_DIR", str(folder))
    acquisition.refusal()
    [report] = acquisition.reports()
    assert report.startswith(f"MNIST_DIR: {folder}")
    assert LAST in report
    assert reason in report
    assert LAST not in acquisition.written()


# From mirrors.


def test_each_file_comes_from_the_first_mirror_that_has_it(
    acquisition: Acquisition, internet: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MNIST_DIR", str(tmp_path / "nowhere"))
    half = serve_mirror(internet, "half", dict(list(SMALL.items())[:2]))
    mirrors = (half, serve_mirror(internet, "all", SMALL))
    acquisition.acquire(mirrors=mirrors, openml=True)
    assert acquisition.written() == SMALL
    reports = acquisition.reports()
    assert reports[0].startswith(f"MNIST_DIR: {tmp_path}/nowhere: there is neither ")
    assert reports[1:3] == [f"{half}/{name}.gz: HTTP status 404" for name in RAW_FILES[2:]]
    assert reports[3].startswith(f"MNIST from {', '.join(mirrors)}; cite ")


def test_files_of_another_data_set_are_refused(acquisition: Acquisition, internet: MirrorServer) -> None:
    mirror = serve_mirror(internet, "other", as_files(random_arrays(num_classes=5)))
    assert "no source of Fashion-MNIST answered" in acquisition.refusal("fashion_mnist", mirrors=(mirror,))
    assert f"{mirror}/{RAW_FILES[1]}.gz: SHA-256 of its 28 bytes is " in acquisition.reports()[0]


# Where no source answers.


def test_unreachable_network_is_one_line_per_host_and_advice(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is scikit-learn called, which would wait long and try again."""

    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda *_, **__: pytest.fail("scikit-learn was called"))
    monkeypatch.setenv(NO_SOURCE_FLAG, str(tmp_path / "flag"))
    assert acquisition.refusal(mirrors=None, openml=True) == (
        "no source of MNIST answered (tried: mirrors, OpenML): set MNIST_DIR to a folder with the four "
        "IDX files, or set fetch.dataset: digits in params.yaml"
    )
    hosts = [f"{base}/{RAW_FILES[0]}.gz" for base in DATASETS["mnist"].mirrors]
    assert acquisition.reports() == [
        *(f"{host}: Temporary failure in name resolution" for host in hosts),
        "OpenML: Temporary failure in name resolution",
    ]
    assert acquisition.written() == {}
    assert (tmp_path / "flag").exists()


@pytest.mark.parametrize(
    ("dataset", "title", "variable", "openml"),
    [
        ("fashion_mnist", "Fashion-MNIST", "FASHION_MNIST_DIR", True),
        ("idx", "IDX files", "IDX_DIR", True),
        ("mnist", "MNIST", "MNIST_DIR", False),
        ("cifar10", "CIFAR-10", "CIFAR10_DIR", True),
        ("folder", "folder of images", "IMAGES_DIR", True),
        ("csv", "images of a CSV file", "IMAGES_CSV", True),
    ],
)
def test_without_a_source_to_ask_only_mnist_has_a_stand_in(
    acquisition: Acquisition,
    internet: MirrorServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: str,
    title: str,
    variable: str,
    *,
    openml: bool,
) -> None:
    monkeypatch.setenv(NO_SOURCE_FLAG, str(tmp_path / "flag"))
    mirrors = () if dataset != "idx" else None
    assert acquisition.refusal(dataset, mirrors=mirrors, openml=openml).startswith(
        f"no source of {title} to ask, as {variable} is not set: set {variable} to {DATASETS[dataset].folder_content}"
    )
    assert internet.requests == []
    assert (tmp_path / "flag").exists() == (dataset == "mnist")


# The section of `params.yaml`, and the catalog.


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_is_documented(name: str) -> None:
    entry, page = DATASETS[name], (ROOT / "docs" / "data.md").read_text()
    assert f"`{name}`" in page
    assert entry.folder_variable in page
    assert f" {name} " in (ROOT / "params.yaml").read_text().split("dataset:")[0]


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize(
    ("shape", "num_classes"), [((12, 10), 4), ((3, 100), 10), ((6, 5, 3), 10), ((6, 5, 4), 2)], ids=str
)
def test_own_folder_may_hold_any_images_and_classes(
    acquisition: Acquisition,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    num_classes: int,
    *,
    gzipped: bool,
) -> None:
    files = as_files(random_arrays(shape, num_classes))
    monkeypatch.setenv("IDX_DIR", str(write_folder(tmp_path / "own", files, gzipped=gzipped)))
    info = acquisition.acquire("idx")
    assert acquisition.written() == files
    assert (info.name, info.image_shape, info.num_classes, info.class_names) == ("idx", shape, num_classes, ())
    assert info.examples == {"train": 20, "test": 10}
    assert info.files == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert acquisition.reports() == [f"IDX files from {tmp_path / 'own'}"]


def test_repeated_images_of_own_files_are_a_warning(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels, test_images, test_labels = random_arrays()
    test_images[2] = images[3]
    monkeypatch.setenv(
        "IDX_DIR", str(write_folder(tmp_path / "own", as_files((images, labels, test_images, test_labels))))
    )
    acquisition.acquire("idx")
    assert acquisition.reports()[0] == (
        "warning: identical images: 1 of 10 test images are also in train; 0 train and 0 test images repeat another of "
        "their split; 1 images have several labels; such as train 3 and test 2"
    )


# Files whose digest is known as they are published: CIFAR-10's archive, and KMNIST.


def cifar_archive(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Return an archive with the members of the binary version: five batches for training, one for testing."""
    records = [bytes([label]) + image.transpose(2, 0, 1).tobytes() for image, label in zip(images, labels, strict=True)]
    parts = {f"data_batch_{number + 1}": records[2 * number : 2 * number + 2] for number in range(5)}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, part in {"readme.html": [b"?"], **parts, "test_batch": records[10:]}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}" + ".bin" * (name != "readme.html"))
            member.size = sum(map(len, part))
            archive.addfile(member, io.BytesIO(b"".join(part)))
    return stream.getvalue()


@pytest.mark.parametrize("source", ["mirror", "folder"])
def test_cifar_becomes_four_files_with_channels_last(
    acquisition: Acquisition, internet: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    images, labels, *_ = random_arrays((32, 32, 3))
    data, archive = cifar_archive(images, labels), "cifar-10-binary.tar.gz"
    entry = dataclasses.replace(DATASETS["cifar10"], packed_sha256=(hashlib.sha256(data).hexdigest(),))
    monkeypatch.setitem(DATASETS, "cifar10", entry)
    internet.routes |= {f"/bad/{archive}": whole(data + b"x"), f"/good/{archive}": whole(data)}
    if source == "folder":
        (tmp_path / archive).write_bytes(data)
        monkeypatch.setenv("CIFAR10_DIR", str(tmp_path))
    info = acquisition.acquire("cifar10", mirrors=(internet.base("bad"), internet.base("good")))
    assert acquisition.written() == as_files((images[:10], labels[:10], images[10:], labels[10:]))
    assert (info.image_shape, info.num_classes, info.classes[:2]) == ((32, 32, 3), 10, ("airplane", "automobile"))
    if source == "mirror":
        assert f"/bad/{archive}: SHA-256 of its {len(data) + 1} bytes is " in acquisition.reports()[0]


def test_digest_of_a_compressed_file_is_verified_before_it_is_unpacked(
    acquisition: Acquisition, internet: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = {name: gzip.compress(data) for name, data in SMALL.items()}
    digests = tuple(hashlib.sha256(data).hexdigest() for data in packed.values())
    entry = dataclasses.replace(DATASETS["kmnist"], num_train=20, num_test=10, packed_sha256=digests)
    monkeypatch.setitem(DATASETS, "kmnist", entry)
    internet.routes |= {f"/good/{name}.gz": whole(data) for name, data in packed.items()}
    internet.routes |= {f"/bad/{name}.gz": whole(gzip.compress(bytes(1 << 20))) for name in packed}
    info = acquisition.acquire("kmnist", mirrors=(internet.base("bad"), internet.base("good")))
    assert acquisition.written() == SMALL
    assert info.classes[3] == "tsu"
    assert all("SHA-256 of its" in report for report in acquisition.reports()[:4])

    monkeypatch.setenv("KMNIST_DIR", str(write_folder(tmp_path / "plain")))  # no digest of these is known
    acquisition.refusal("kmnist")
    assert f"there is no {RAW_FILES[0]}.gz" in acquisition.reports()[0]


# Image files; see also `test_image_files`.


@pytest.mark.parametrize("dataset", ["folder", "csv"])
def test_image_files_become_four_files_with_the_names_of_the_classes(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str
) -> None:
    rows = ["path,label"]
    for name in ("cat", "owl"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(5):
            pixels = np.random.default_rng([index, len(rows)]).integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{index}.png")
            rows.append(f"{name}/{index}.png,{name}")
    (tmp_path / "images" / "list.csv").write_text("\n".join(rows))
    variable, source = ("IMAGES_DIR", "images") if dataset == "folder" else ("IMAGES_CSV", "images/list.csv")
    monkeypatch.setenv(variable, str(tmp_path / source))
    info = acquisition.acquire(dataset)
    assert (info.image_shape, info.class_names, info.num_classes) == ((32, 32, 3), ("cat", "owl"), 2)
    assert info.examples == {"train": 8, "test": 2}
    assert acquisition.reports() == [f"{DATASETS[dataset].title}: 10 images in 2 classes from {tmp_path / source}"]
    write_info(acquisition.to, info)
    assert read_info(acquisition.to) == info

    (tmp_path / "images" / "cat" / "0.png").write_bytes(b"\x89PNG")
    assert acquisition.refusal(dataset).startswith(f"{variable}: {tmp_path}/images/cat/0.png: not a readable image")


def channels(count: int) -> dict[str, bytes | None]:
    return dict(as_files(random_arrays((6, 5, count))))


OWN_FAULTS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "missing": ({LAST: None}, f"there is neither {LAST} nor {LAST}.gz"),
    "no IDX": ({LAST: b"label,pixel\n" * 10}, f"{LAST}: magic number is 0x6c616265"),
    "truncated": ({RAW_FILES[0]: SMALL[RAW_FILES[0]][:-1]}, "needs exactly"),
    "a label too few": (
        {RAW_FILES[1]: encode_idx(np.zeros(19, np.uint8))},
        f"{RAW_FILES[0]}: 20 images, but 19 labels",
    ),
    "test images of another size": (
        {RAW_FILES[2]: encode_idx(np.zeros((10, 28, 27), np.uint8))},
        f"{RAW_FILES[2]}: images of (28, 27) pixels, but (28, 28) in {RAW_FILES[0]}",
    ),
    "a single class": (dict(as_files(random_arrays(num_classes=1))), f"{RAW_FILES[1]}: every label is 0; at least 2"),
    **{
        f"{count} channels": (channels(count), f"{RAW_FILES[0]}: {count} channels as the fourth dimension; 3 or 4 are")
        for count in (1, 2, 5)
    },
    "pointer of Git LFS": ({LAST: LFS_POINTER}, f"{LAST}: a Git LFS pointer, not the file itself; `git lfs pull`"),
}


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_faulty_own_file_is_named_in_one_line(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    files, reason = OWN_FAULTS[fault]
    present = {name: data for name, data in (SMALL | files).items() if data is not None}
    folder = write_folder(tmp_path / "own", present)
    monkeypatch.setenv("IDX_DIR", str(folder))
    line = acquisition.refusal("idx", mirrors=None, openml=True)
    assert line.startswith(f"IDX_DIR: {folder}")
    assert reason in line
    assert str(acquisition.to) not in line
    assert acquisition.reports() == []


def test_gzip_bomb_in_own_folder_ends_at_a_limit(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_MAX_OWN_BYTES", 1 << 20)
    monkeypatch.setenv("IDX_DIR", str(write_folder(tmp_path / "own", {**SMALL, LAST: bytes(1 << 24)}, gzipped=True)))
    assert f"{LAST}.gz: more than 1048576 bytes" in acquisition.refusal("idx")


def test_openml_comes_last_and_ends_in_the_same_files(
    acquisition: Acquisition, internet: MirrorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was loaded")

    for loader in ("pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load"):
        monkeypatch.setattr(loader, refuse)
    acquisition.acquire(mirrors=(internet.base("gone"),), openml=True)
    assert acquisition.written() == SMALL
    assert acquisition.reports()[-1].startswith("MNIST from OpenML mnist_784, version 1; cite ")
    assert internet.requests.count("/download") == 1
    assert socket.getdefaulttimeout() is None


def test_other_rows_of_openml_are_refused(acquisition: Acquisition, internet: MirrorServer) -> None:
    serve_openml(internet, tuple(array[::-1] for array in random_arrays()))  # type: ignore[arg-type]
    acquisition.refusal(openml=True)
    assert acquisition.reports()[0].startswith("OpenML: SHA-256 of its 15696 bytes is ")
    assert acquisition.written() == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/_SEARCH_NAME/mnist_784/data_version/1", b"<html>"),
        ("/_DATA_INFO/554", b"{}"),
        ("/_DATA_FEATURES/554", b'{"data_features": {"feature": []}}'),
        ("/download", b"@RELATION\n\n?"),
    ],
)
def test_faulty_answer_of_openml_is_one_line(
    acquisition: Acquisition, internet: MirrorServer, path: str, body: bytes
) -> None:
    internet.routes[path] = whole(body)
    acquisition.refusal(openml=True)
    [report] = acquisition.reports()
    assert report.startswith("OpenML: ")
    assert acquisition.written() == {}
    assert socket.getdefaulttimeout() is None


# Mirrors that misbehave: a download ends with the right bytes, or with the reason in one line.


CONTENT = b"".join(hashlib.sha256(bytes([seed])).digest() * 2 for seed in range(256)) * 16  # 256 KiB, hard to compress
PACKED = gzip.compress(CONTENT, mtime=0)
FILE = KnownFile(name="images", max_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


class Client:
    """Downloads `FILE` from mirrors to a folder; `reports` lists what was reported."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.to, self._capsys = folder / "raw", capsys
        self.to.mkdir()

    def download(self, *bases: str, timeout_seconds: float = 10.0) -> str:
        return fetch.download(FILE, bases, self.to, timeout_seconds=timeout_seconds)

    def reports(self) -> list[str]:
        lines = self._capsys.readouterr().err.splitlines()
        assert all(line.startswith("fetch: ") for line in lines)
        return [line.removeprefix("fetch: ") for line in lines]

    def assert_delivered_by(self, base: str, *bases: str, **options: float) -> None:
        assert self.download(*bases or (base,), **options) == base
        assert (self.to / FILE.name).read_bytes() == CONTENT
        assert list(self.to.iterdir()) == [self.to / FILE.name]

    def refusal(self, base: str) -> str:
        """Return the reason reported of a download that fails."""
        with pytest.raises(NoSourceError, match=r"mirrors: none delivered images\.gz"):
            self.download(base)
        assert list(self.to.iterdir()) == []
        [report] = self.reports()
        return report


@pytest.fixture
def client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Client:
    return Client(tmp_path, capsys)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MirrorServer]:
    """A server that is reached without a proxy, with one good mirror."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with mirror_server() as server:
        server.routes["good"] = whole(PACKED)
        yield server


def stalling(handler: Handler) -> None:
    handler.head(200, Content_Length=len(PACKED))
    handler.wfile.write(PACKED[: len(PACKED) // 2])
    handler.server.closing.wait(60)


def breaking(handler: Handler) -> None:
    handler.head(200, Content_Length=len(PACKED))
    handler.wfile.write(PACKED[: len(PACKED) // 2])


def test_progress_ends_at_the_length_that_the_server_states(
    server: MirrorServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[float] = []
    progress_bar = fetch.progress_bar

    def recording(description: str, total: float, **options: Any) -> Any:
        totals.append(total)
        return progress_bar(description, total, **options)

    monkeypatch.setattr(fetch, "progress_bar", recording)
    client.assert_delivered_by(server.base("good"))
    assert totals == [len(PACKED)]


def raw(head: bytes, forever: bytes = b"") -> Route:
    """Send bytes that need not be HTTP, then others without end."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(head)
        while forever and not handler.server.closing.is_set():
            handler.wfile.write(forever)

    return answer


def never_answering(handler: Handler) -> None:
    handler.server.closing.wait(60)


def gzip_of_many_zeros() -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=31)
    blocks = [packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)]
    yield blocks[0]
    while True:
        yield blocks[1] * 100


def gzip_of_nothing() -> Iterator[bytes]:
    """Yield a gzip header, then empty stored blocks: input without end that never unpacks to a byte."""
    yield bytes.fromhex("1f8b08000000000000ff")
    while True:
        yield bytes.fromhex("000000ffff") * 20_000


def letters() -> Iterator[bytes]:
    while True:
        yield b"la" * 10_000


def test_next_mirror_is_not_requested_after_success(server: MirrorServer, client: Client) -> None:
    client.assert_delivered_by(server.base("good"), server.base("good"), server.base("other"))
    assert client.reports() == []
    assert server.requests == ["/good/images.gz"]


OK = b"HTTP/1.1 200 OK\r\n"
MIRROR_FAULTS: dict[str, tuple[Route, str]] = {
    "no HTTP": (raw(b"\0\xff garbage\r\n\r\n"), "BadStatusLine"),
    "endless header": (raw(OK + b"X: ", b"x" * 10_000), "LineTooLong"),
    "endless headers": (raw(OK, b"X: y\r\n" * 100), "more than 100 headers"),
    "two lengths": (raw(OK + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n" + PACKED), "multiple unmatching values"),
    "404": (status(404), "HTTP status 404"),
    "204": (status(204), "HTTP status 204"),
    "206 unasked": (status(206, Content_Range="bytes 5-9/10"), "HTTP status 206"),
    "503 without end": (endless(letters, 503), "HTTP status 503"),
    "html": (whole(b"<!DOCTYPE html><title>Welcome to the hotel's network</title>"), "no valid gzip"),
    "empty": (whole(b""), "SHA-256 of its 0 bytes is "),
    "broken connection": (breaking, "more expected"),
    "truncated gzip": (whole(PACKED[:-5]), "no valid gzip file (Compressed file ended"),
    "damaged gzip": (whole(PACKED[:-6] + b"??" + PACKED[-4:]), "no valid gzip file (CRC check failed"),
    "wrong bytes": (whole(gzip.compress(CONTENT[::-1])), "SHA-256 of its 262144 bytes is "),
    "too short": (whole(gzip.compress(CONTENT[:-1])), f"of {len(CONTENT)} bytes"),
    "too long": (whole(gzip.compress(CONTENT + b"x")), f"more than {len(CONTENT)} bytes"),
    "trailing bytes": (whole(PACKED + b"x"), "no valid gzip"),
    "gzip bomb": (endless(gzip_of_many_zeros), "compressed bytes"),
    "endless nothing": (endless(gzip_of_nothing), "compressed bytes"),
    "endless text": (endless(letters), "compressed bytes"),
    "redirect loop": (endless(letters, 302), "HTTP status 302"),
    "redirect to a file": (status(302, Location="file:///etc/hostname"), "No connection adapters"),
    "redirect to nothing": (status(302, Location="http://[/"), "IPv6"),
}


@pytest.mark.parametrize("name", MIRROR_FAULTS)
def test_faulty_mirror_is_reported_and_next_mirror_delivers(server: MirrorServer, client: Client, name: str) -> None:
    server.routes["faulty"], reason = MIRROR_FAULTS[name]
    faulty, good = server.base("faulty"), server.base("good")
    assert reason in client.refusal(faulty)
    client.assert_delivered_by(good, faulty, good)
    [report] = client.reports()
    assert report.startswith(f"{faulty}/images.gz: ")
    assert reason in report


def test_redirect_is_followed(server: MirrorServer, client: Client) -> None:
    server.routes["moved"] = status(302, Location="/good/images.gz")
    client.assert_delivered_by(server.base("moved"))


def test_gzip_declared_as_content_encoding_is_not_decoded_twice(server: MirrorServer, client: Client) -> None:
    server.routes["labelled"] = whole(PACKED, Content_Encoding="gzip")
    client.assert_delivered_by(server.base("labelled"))


@fuzz(100)
@given(data=damaged(PACKED[:2000]))
def test_damaged_gzip_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SourceError):
        FILE.write(data, tmp_path, gzipped=True)
    assert list(tmp_path.iterdir()) == []


SLOW: dict[str, tuple[Route, str]] = {
    "stall": (stalling, "timed out"),
    "no answer": (never_answering, "timed out"),
    "dripping body": (endless(lambda: iter(lambda: b"n", b""), pause_seconds=0.02), "not complete within the time"),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_mirror_is_given_up(
    server: MirrorServer, client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "STALL_SECONDS", 0.5)
    server.routes["slow"], reason = SLOW[name]
    client.assert_delivered_by(server.base("good"), server.base("slow"), server.base("good"), timeout_seconds=0.5)
    [report] = client.reports()
    assert reason in report


def test_refused_connection_is_reported(client: Client) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{bound.getsockname()[1]}/mnist"
        assert client.refusal(base).endswith("images.gz: Connection refused")


def test_proxy_of_environment_is_used(server: MirrorServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    server.routes["http:"] = whole(PACKED)  # a proxy is asked for the whole URL
    monkeypatch.setenv("http_proxy", server.base())
    client.assert_delivered_by("http://mirror.invalid/mnist")
    assert server.requests == ["http://mirror.invalid/mnist/images.gz"]


@pytest.mark.parametrize(
    "base",
    [
        *("ftp://127.0.0.1/mnist", "/data/mnist", "http://", "http://host:port/", "http://host/\nb", ""),
        *("http://user:secret@host/", "http://host/?name="),
    ],
)
def test_only_http_urls_are_accepted(base: str) -> None:
    with pytest.raises(UserError, match="only http:// and https:// URLs") as caught:
        require_url(base)
    assert "\n" not in str(caught.value)
