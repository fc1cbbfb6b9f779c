"""Each source of a data set delivers the same four verified files; the order of the sources, and their absence.

Most tests let a dozen random images stand for MNIST, under its name.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import re
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bad_http_server import Handler, MirrorServer, Route, endless, mirror_server, status, whole
from factories import ROOT, preprocess_config
from PIL import Image

from gradtrail.core.data import prepare
from gradtrail.stages import fetch
from gradtrail.stages.common.environment import RuntimeConfig
from gradtrail.stages.common.params import load_section
from gradtrail.stages.data.data_files import (
    RAW_FILES,
    DatasetInfo,
    RawArrays,
    encode_idx,
    read_info,
    read_raw,
    read_splits,
    with_files,
    write_info,
    write_processed,
)
from gradtrail.stages.data.pictures import cropped, read_picture
from gradtrail.stages.datasets import DATASETS
from gradtrail.stages.fetch import FetchConfig, acquire
from gradtrail.support.errors import NO_SOURCE_FLAG, UserError

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
        self,
        dataset: str = "mnist",
        *,
        mirrors: tuple[str, ...] | None = (),
        openml: bool = False,
        timeout_seconds: float = 10.0,
    ) -> DatasetInfo:
        runtime = dataclasses.replace(RUNTIME, mirrors=mirrors, openml=openml, download_timeout_seconds=timeout_seconds)
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
        entry = dataclasses.replace(DATASETS[name], num_train=20, sha256=DIGESTS)  # type: ignore[arg-type]
        monkeypatch.setitem(DATASETS, name, entry)
    return Acquisition(tmp_path, capsys)


def serve_mirror(internet: MirrorServer, route: str, files: dict[str, bytes]) -> str:
    internet.routes |= {f"/{route}/{name}.gz": whole(gzip.compress(data)) for name, data in files.items()}
    return internet.base(route)


# From a folder.


@pytest.mark.parametrize("gzipped", [False, True])
def test_folder_comes_first(
    acquisition: Acquisition, internet: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gzipped: bool
) -> None:
    monkeypatch.setenv("MNIST_DIR", str(write_folder(tmp_path / "folder", gzipped=gzipped)))
    info = acquisition.acquire(mirrors=(internet.base(),), openml=True)
    assert acquisition.written() == SMALL
    assert (info.name, info.image_shape, info.num_classes) == ("mnist", (28, 28), 10)
    entry = DATASETS["mnist"]
    assert acquisition.reports() == [f"{entry.title} from {tmp_path / 'folder'}; cite {entry.citation}"]
    assert internet.requests == []


def test_faulty_folder_is_reported_and_next_source_is_used(
    acquisition: Acquisition, internet: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "folder", SMALL | {LAST: SMALL[LAST][:-1] + b"?"})
    monkeypatch.setenv("MNIST_DIR", str(folder))
    acquisition.acquire(mirrors=(serve_mirror(internet, "good", SMALL),))
    assert acquisition.written() == SMALL
    assert acquisition.reports()[0].startswith(f"MNIST_DIR: {folder / LAST}: SHA-256 of its 18 bytes is ")


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


def stopping(handler: Handler, *, seconds: float = 0.0) -> None:
    """Send a part of the body, then nothing for a while."""
    handler.head(200, Content_Length=1000)
    handler.wfile.write(gzip.compress(bytes(1000))[:10])
    handler.server.closing.wait(seconds)


def dripping() -> Iterator[bytes]:
    while True:
        yield b"n"


MIRROR_FAULTS: dict[str, tuple[Route, str]] = {
    "no HTTP": (lambda handler: handler.wfile.write(b"\0\xff garbage\r\n\r\n"), "BadStatusLine"),
    "not found": (status(404), "HTTP status 404"),
    "page of a hotel": (whole(b"<!DOCTYPE html>"), "no valid gzip"),
    "truncated gzip": (whole(gzip.compress(bytes(99))[:-5]), "no valid gzip file (Compressed file ended"),
    "wrong bytes": (whole(gzip.compress(bytes(99))), "SHA-256 of its 99 bytes is "),
    "broken connection": (stopping, "more expected"),
    "stall": (lambda handler: stopping(handler, seconds=60.0), "timed out"),
    "slow bytes": (endless(dripping, pause_seconds=0.02), "not complete within the time allowed"),
    "redirect to a file": (status(302, Location="file:///etc/hostname"), "No connection adapters"),
}


@pytest.mark.parametrize("fault", MIRROR_FAULTS)
def test_faulty_mirror_is_one_line_and_the_next_mirror_delivers(
    acquisition: Acquisition, internet: MirrorServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(fetch, "STALL_SECONDS", 0.2)
    internet.routes["faulty"], reason = MIRROR_FAULTS[fault]
    faulty, good = internet.base("faulty"), serve_mirror(internet, "good", SMALL)
    acquisition.acquire(mirrors=(faulty, good), timeout_seconds=0.2)
    assert acquisition.written() == SMALL
    *faults, success = acquisition.reports()
    for name, report in zip(RAW_FILES, faults, strict=True):
        assert report.startswith(f"{faulty}/{name}.gz: ")
        assert reason in report
    assert success.startswith(f"MNIST from {good}; cite ")


def test_mirror_may_redirect_and_declare_gzip_as_an_encoding(acquisition: Acquisition, internet: MirrorServer) -> None:
    for name, data in SMALL.items():
        internet.routes[f"/moved/{name}.gz"] = status(302, Location=f"/labelled/{name}.gz")
        internet.routes[f"/labelled/{name}.gz"] = whole(gzip.compress(data), Content_Encoding="gzip")
    acquisition.acquire(mirrors=(internet.base("moved"),))
    assert acquisition.written() == SMALL


def test_proxy_of_the_environment_is_used(
    acquisition: Acquisition, internet: MirrorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {f"http://mirror.invalid/{name}.gz": whole(gzip.compress(data)) for name, data in SMALL.items()}
    internet.routes |= urls  # a proxy is asked for the whole URL
    monkeypatch.setenv("http_proxy", internet.base())
    acquisition.acquire(mirrors=("http://mirror.invalid",))
    assert internet.requests == [*urls]


def test_password_of_a_mirror_is_hidden(acquisition: Acquisition) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        acquisition.refusal(mirrors=(f"http://me:secret@127.0.0.1:{bound.getsockname()[1]}", "ftp://host/mnist"))
    refused, wrong = acquisition.reports()
    assert refused.endswith("images-idx3-ubyte.gz: Connection refused")
    assert "secret" not in refused
    assert "No connection adapters" in wrong


# Where no source answers.


def test_unreachable_network_is_one_line_per_host_and_advice(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
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


@pytest.mark.parametrize("dataset", [name for name, entry in DATASETS.items() if entry.folder_variable])
def test_without_a_source_to_ask_only_mnist_has_a_stand_in(
    acquisition: Acquisition, internet: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str
) -> None:
    monkeypatch.setenv(NO_SOURCE_FLAG, str(tmp_path / "flag"))
    entry = DATASETS[dataset]
    assert acquisition.refusal(dataset, openml=dataset != "mnist").startswith(
        f"no source of {entry.title} to ask, as {entry.folder_variable} is not set: set {entry.folder_variable} to "
        f"{entry.folder_content}"
    )
    assert internet.requests == []
    assert (tmp_path / "flag").exists() == (dataset == "mnist")


# The section of `params.yaml`, and the catalog.


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_is_documented(name: str) -> None:
    entry, page = DATASETS[name], (ROOT / "docs" / "data.md").read_text()
    assert f"`{name}`" in page
    assert entry.folder_variable in page
    assert re.search(rf"^  dataset: .*#.* {name}\b", (ROOT / "params.yaml").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("shape", "num_classes"), [((12, 10), 4), ((3, 100), 10), ((6, 5, 4), 2)], ids=str)
def test_own_folder_may_hold_any_images_and_classes(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], num_classes: int
) -> None:
    files = as_files(random_arrays(shape, num_classes))
    monkeypatch.setenv("IDX_DIR", str(write_folder(tmp_path / "own", files)))
    info = acquisition.acquire("idx")
    assert acquisition.written() == files
    assert (info.name, info.image_shape, info.num_classes, info.class_names) == ("idx", shape, num_classes, ())
    assert info.examples == {"train": 20, "test": 10}
    assert info.files == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    counts, origin = acquisition.reports()
    assert counts.startswith(f"{num_classes} classes, ")
    assert sum(map(int, re.findall(r"\d+ (\d+)(?=,|$)", counts.partition(": ")[2]))) == 30
    assert origin == f"IDX files from {tmp_path / 'own'}"


def test_repeated_images_of_own_files_are_a_warning(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = random_arrays()
    arrays[2][2] = arrays[0][3]
    monkeypatch.setenv("IDX_DIR", str(write_folder(tmp_path / "own", as_files(arrays))))
    acquisition.acquire("idx")
    assert acquisition.reports()[1] == (
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


def test_cifar_becomes_four_files_with_channels_last(
    acquisition: Acquisition, internet: MirrorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels, *_ = random_arrays((32, 32, 3))
    data, archive = cifar_archive(images, labels), "cifar-10-binary.tar.gz"
    entry = dataclasses.replace(DATASETS["cifar10"], packed_sha256=(hashlib.sha256(data).hexdigest(),))
    monkeypatch.setitem(DATASETS, "cifar10", entry)
    internet.routes |= {f"/bad/{archive}": whole(gzip.compress(b"x")), f"/good/{archive}": whole(data)}
    info = acquisition.acquire("cifar10", mirrors=(internet.base("bad"), internet.base("good")))
    assert acquisition.written() == as_files((images[:10], labels[:10], images[10:], labels[10:]))
    assert (info.image_shape, info.num_classes, info.classes[:2]) == ((32, 32, 3), 10, ("airplane", "automobile"))
    assert f"/bad/{archive}: SHA-256 of its 21 bytes is " in acquisition.reports()[0]


def test_digest_may_be_that_of_the_compressed_file(
    acquisition: Acquisition, internet: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = {name: gzip.compress(data, mtime=1) for name, data in SMALL.items()}
    digests = tuple(hashlib.sha256(data).hexdigest() for data in packed.values())
    monkeypatch.setitem(DATASETS, "kmnist", dataclasses.replace(DATASETS["kmnist"], packed_sha256=digests))
    internet.routes |= {f"/good/{name}.gz": whole(data) for name, data in packed.items()}
    bad = serve_mirror(internet, "bad", SMALL)
    monkeypatch.setenv("KMNIST_DIR", str(write_folder(tmp_path / "plain")))  # no digest of these is known
    assert acquisition.acquire("kmnist", mirrors=(bad, internet.base("good"))).classes[3] == "tsu"
    assert acquisition.written() == SMALL
    reports = acquisition.reports()
    assert f"there is no {RAW_FILES[0]}.gz" in reports[0]
    assert all("SHA-256 of its" in report for report in reports[1:5])


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
    assert acquisition.reports() == [
        "2 classes, 5 to 5 images: cat 5, owl 5",
        "sides of 40 to 40 pixels, median 40; 0 of 10 images are enlarged to 32 × 32 (fetch.pictures.size)",
        f"{DATASETS[dataset].title}: 10 images from {tmp_path / source}"
        + "; hidden files and other types passed over: 1" * (dataset == "folder"),
    ]
    write_info(acquisition.to, info)
    assert read_info(acquisition.to) == info

    splits = prepare(*read_raw(acquisition.to), preprocess_config(validation_fraction=0.5), num_classes=2)
    write_processed(tmp_path / "processed", with_files(splits, acquisition.to), info)
    for split in read_splits(tmp_path / "processed").values():
        assert split.files is not None
        for image, file in zip(split.images, split.files, strict=True):
            pixels = read_picture(tmp_path / "images" / str(file), color=True).pixels
            np.testing.assert_array_equal(image, cropped(pixels, (32, 32)))

    (tmp_path / "images" / "cat" / "0.png").write_bytes(b"\x89PNG")
    assert acquisition.refusal(dataset).startswith(f"{variable}: {tmp_path}/images/cat/0.png: not a readable image")


IMAGES, LABELS, TEST_IMAGES, _ = RAW_FILES
OWN_FAULTS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "missing": ({LAST: None}, f"there is neither {LAST} nor {LAST}.gz"),
    "no IDX": ({LAST: b"label,pixel\n" * 10}, f"{LAST}: magic number is 0x6c616265"),
    "a label too few": ({LABELS: encode_idx(np.zeros(19, np.uint8))}, f"{IMAGES}: 20 images, but 19 labels"),
    "test images of another size": (
        {TEST_IMAGES: encode_idx(np.zeros((10, 28, 27), np.uint8))},
        f"{TEST_IMAGES}: images of (28, 27) pixels, but (28, 28) in {IMAGES}",
    ),
    "a single class": ({**as_files(random_arrays(num_classes=1))}, f"{LABELS}: every label is 0; at least 2"),
    "2 channels": ({**as_files(random_arrays((6, 5, 2)))}, f"{IMAGES}: 2 channels as the fourth dimension; 3 or 4 are"),
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
    ("path", "body"), [("/_SEARCH_NAME/mnist_784/data_version/1", b"<html>"), ("/download", b"@RELATION\n\n?")]
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
