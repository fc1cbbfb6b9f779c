"""Each source of MNIST ends in the same four verified files; the order of the sources; the digits to the byte.

Most tests let a dozen random images stand for MNIST, under its names. The real files are used where MNIST_DIR is set.
"""

import gzip
import hashlib
import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import sklearn.datasets  # type: ignore[import-untyped]
from sklearn.datasets import _openml

from gradtrail.stages.artifacts.idx import encode_idx, read_idx
from gradtrail.stages.fetch import mnist_sources
from gradtrail.stages.fetch.mnist_sources import IdxFile, acquire_mnist, digits, from_folder, from_mirrors, from_openml
from gradtrail.support.errors import NoSourceError, UserError

NUM_TRAIN, NUM_TEST = 8, 4
NAMES = [file.name for file in mnist_sources.MNIST_FILES]

needs_mnist = pytest.mark.skipif(
    "MNIST_DIR" not in os.environ, reason="MNIST_DIR is not set: it names a folder with the four files of MNIST"
)


def small_arrays() -> list[npt.NDArray[np.uint8]]:
    generator = np.random.default_rng(0)
    shapes = [(NUM_TRAIN, 28, 28), (NUM_TRAIN,), (NUM_TEST, 28, 28), (NUM_TEST,)]
    return [generator.integers(0, 256 if len(shape) == 3 else 10, shape, dtype=np.uint8) for shape in shapes]


SMALL = {name: encode_idx(array) for name, array in zip(NAMES, small_arrays(), strict=True)}


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small files be what MNIST is."""
    files = tuple(
        IdxFile(name=name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), shape=array.shape)
        for (name, data), array in zip(SMALL.items(), small_arrays(), strict=True)
    )
    monkeypatch.setattr(mnist_sources, "MNIST_FILES", files)


class Server(http.server.ThreadingHTTPServer):
    """Serves `bodies` by path, and breaks after those in `broken`; `asked` lists the paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: dict[str, bytes] = {}
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.base = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers from the server's bodies."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = self.server.bodies.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"") + (self.path in self.server.broken)))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        """Be silent."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def openml(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Let scikit-learn and us find OpenML on the loopback interface, holding the small files."""
    monkeypatch.setattr(mnist_sources, "OPENML_URL", server.base)
    for constant, path in {
        "_SEARCH_NAME": "/list/{}",
        "_DATA_INFO": "/info/{}",
        "_DATA_FEATURES": "/features/{}",
        "_DATA_QUALITIES": "/qualities/{}",
    }.items():
        monkeypatch.setattr(_openml, constant, server.base + path)
    train_images, train_labels, test_images, test_labels = small_arrays()
    serve_openml(server, np.concatenate([train_images, test_images]), np.concatenate([train_labels, test_labels]))
    return server


def serve_openml(server: Server, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> None:
    """Serve what OpenML's API answers for mnist_784: pixels are numeric columns, labels a nominal one."""
    pixels = [f"pixel{place + 1}" for place in range(784)]
    lines = ["@RELATION mnist_784", *(f"@ATTRIBUTE {pixel} real" for pixel in pixels)]
    lines += ["@ATTRIBUTE class {0,1,2,3,4,5,6,7,8,9}", "@DATA"]
    rows = zip(images.reshape(-1, 784).tolist(), labels.tolist(), strict=True)
    arff = "\n".join([*lines, *(",".join(map(str, [*row, label])) for row, label in rows), ""]).encode()
    flags = {"is_ignore": "false", "is_row_identifier": "false", "number_of_missing_values": "0"}
    features = [{"name": pixel, "data_type": "numeric", "is_target": "false", **flags} for pixel in pixels]
    features.append({"name": "class", "data_type": "nominal", "is_target": "true", **flags})
    description = {
        "name": "mnist_784",
        "version": "1",
        "status": "active",
        "format": "ARFF",
        "description": "",
        "url": f"{server.base}/download/mnist_784.arff",
        "md5_checksum": hashlib.md5(arff, usedforsecurity=False).hexdigest(),
    }
    qualities = [{"name": "NumberOfInstances", "value": str(len(labels))}]
    server.bodies |= {
        "/list/mnist_784/data_version/1": as_json({"data": {"dataset": [{"did": 554, "version": 1}]}}),
        "/info/554": as_json({"data_set_description": description}),
        "/features/554": as_json({"data_features": {"feature": features}}),
        "/qualities/554": as_json({"data_qualities": {"quality": qualities}}),
        "/download/mnist_784.arff": arff,
    }


def as_json(content: object) -> bytes:
    return json.dumps(content).encode()


def write_folder(folder: Path, *, gzipped: bool) -> Path:
    folder.mkdir()
    for name, data in SMALL.items():
        (folder / (name + ".gz" * gzipped)).write_bytes(gzip.compress(data) if gzipped else data)
    return folder


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# From a folder.


@pytest.mark.parametrize("gzipped", [False, True])
def test_a_folder_is_copied_and_verified(tmp_path: Path, small_mnist: None, *, gzipped: bool) -> None:
    folder, to = write_folder(tmp_path / "mnist", gzipped=gzipped), new_folder(tmp_path / "to")
    assert from_folder(folder, to) == f"MNIST_DIR={folder}"
    assert contents(to) == SMALL


FAULTS: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("", None, "there is neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz"),
    "other bytes": ("", SMALL[NAMES[3]][:-1] + b"?", "sha256 is "),
    "truncated": ("", SMALL[NAMES[3]][:-1], "11 bytes instead of 12"),
    "too long": ("", SMALL[NAMES[3]] + b"x", "more than the 12 bytes"),
    "no gzip": (".gz", SMALL[NAMES[3]], "no valid gzip"),
    "truncated gzip": (".gz", gzip.compress(SMALL[NAMES[3]])[:-1], "the gzip stream is truncated"),
    "gzip of other bytes": (".gz", gzip.compress(b"\0" * 12), "sha256 is "),
    "gzip bomb": (".gz", gzip.compress(bytes(1 << 24)), "more than the 12 bytes"),
    "gzip and more": (".gz", gzip.compress(SMALL[NAMES[3]]) + b"x", "other bytes follow"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_folder_is_refused(tmp_path: Path, small_mnist: None, fault: str) -> None:
    suffix, data, reason = FAULTS[fault]
    folder, to = write_folder(tmp_path / "mnist", gzipped=False), new_folder(tmp_path / "to")
    (folder / NAMES[3]).unlink()
    if data is not None:
        (folder / (NAMES[3] + suffix)).write_bytes(data)
    with pytest.raises(UserError) as caught:
        from_folder(folder, to)
    message = str(caught.value)
    assert message.startswith(f"MNIST_DIR: {folder}")
    assert NAMES[3] in message
    assert reason in message
    assert "\n" not in message
    assert sorted(contents(to)) == sorted(NAMES[:3])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path, small_mnist: None) -> None:
    folder = write_folder(tmp_path / "mnist", gzipped=False)
    (folder / NAMES[0]).chmod(0)
    with pytest.raises(UserError, match=f"{NAMES[0]}: Permission denied"):
        from_folder(folder, new_folder(tmp_path / "to"))


@needs_mnist
def test_the_real_files_are_those_that_the_constants_describe(tmp_path: Path) -> None:
    from_folder(Path(os.environ["MNIST_DIR"]), tmp_path)
    arrays = [read_idx(tmp_path / file.name, shape=file.shape) for file in mnist_sources.MNIST_FILES]
    assert np.bincount(arrays[1]).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    for file, array in zip(mnist_sources.MNIST_FILES, arrays, strict=True):
        assert hashlib.sha256(encode_idx(array)).hexdigest() == file.sha256


# From mirrors.


def serve_mirror(server: Server, path: str, names: list[str]) -> str:
    server.bodies |= {f"{path}/{name}.gz": gzip.compress(SMALL[name]) for name in names}
    return server.base + path


def test_each_file_comes_from_the_first_mirror_that_has_it(server: Server, tmp_path: Path, small_mnist: None) -> None:
    mirrors = [serve_mirror(server, "/half", NAMES[:2]), serve_mirror(server, "/all", NAMES)]
    reports: list[str] = []
    to = new_folder(tmp_path / "to")
    source = from_mirrors(mirrors, to, parts=tmp_path / "parts", timeout_seconds=10, report=reports.append)
    assert source == ", ".join(mirrors)
    assert contents(to) == SMALL
    assert reports == [f"{mirrors[0]}/{name}.gz: HTTP status 404" for name in NAMES[2:]]


# From OpenML.


def test_openml_ends_in_the_same_files(openml: Server, tmp_path: Path, small_mnist: None) -> None:
    assert from_openml(tmp_path) == "OpenML mnist_784, version 1"
    assert contents(tmp_path) == SMALL
    assert openml.asked.count("/download/mnist_784.arff") == 1
    assert socket.getdefaulttimeout() is None


def test_openml_loads_no_pickle(
    openml: Server, tmp_path: Path, small_mnist: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was loaded")

    for loader in ("pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load"):
        monkeypatch.setattr(loader, refuse)
    from_openml(tmp_path)
    digits(tmp_path)


def test_other_rows_of_openml_are_refused(openml: Server, tmp_path: Path, small_mnist: None) -> None:
    images = np.concatenate(small_arrays()[::2])
    labels = np.concatenate(small_arrays()[1::2])
    serve_openml(openml, images[::-1], labels[::-1])
    with pytest.raises(NoSourceError, match="OpenML: sha256 is "):
        from_openml(tmp_path)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/list/mnist_784/data_version/1", b"<html>"),
        ("/info/554", b"{}"),
        ("/features/554", b'{"data_features": {"feature": []}}'),
        ("/download/mnist_784.arff", b"@RELATION\n\n?"),
    ],
)
def test_whatever_openml_answers_the_fault_is_one_line(
    openml: Server, tmp_path: Path, small_mnist: None, path: str, body: bytes
) -> None:
    openml.bodies[path] = body
    with pytest.raises(NoSourceError, match=r"^OpenML: ") as caught:
        from_openml(tmp_path)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == {}
    assert socket.getdefaulttimeout() is None


def test_scikit_learn_is_not_called_where_openml_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would try again, and wait long for each address."""

    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(mnist_sources, "OPENML_URL", "http://openml.invalid")
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda *_, **__: pytest.fail("scikit-learn was called"))
    with pytest.raises(NoSourceError, match=r"^OpenML: Temporary failure in name resolution$"):
        from_openml(tmp_path)


# The order of the sources.


class Acquisition:
    """Calls `acquire_mnist` with sources of which some work; `reports` lists what was reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.to = new_folder(folder / "to")
        self.reports: list[str] = []

    def acquire(self, *, folder: Path | None, mirrors: list[str], openml: bool) -> str:
        return acquire_mnist(
            self.to,
            folder=folder,
            mirrors=mirrors,
            openml=openml,
            parts=self.folder / "parts",
            timeout_seconds=10,
            report=self.reports.append,
        )


def test_the_folder_comes_first(openml: Server, tmp_path: Path, small_mnist: None) -> None:
    folder = write_folder(tmp_path / "mnist", gzipped=True)
    acquisition = Acquisition(tmp_path)
    source = acquisition.acquire(folder=folder, mirrors=[openml.base], openml=True)
    assert source == f"MNIST_DIR={folder}"
    assert contents(acquisition.to) == SMALL
    assert (acquisition.reports, openml.asked) == ([], [])


def test_mirrors_come_after_a_faulty_folder(openml: Server, tmp_path: Path, small_mnist: None) -> None:
    mirror = serve_mirror(openml, "/mirror", NAMES)
    acquisition = Acquisition(tmp_path)
    assert acquisition.acquire(folder=tmp_path / "nowhere", mirrors=[mirror], openml=True) == mirror
    assert contents(acquisition.to) == SMALL
    [report] = acquisition.reports
    assert report.startswith(f"MNIST_DIR: {tmp_path}/nowhere: there is neither ")
    assert openml.asked == [f"/mirror/{name}.gz" for name in NAMES]


def test_openml_comes_last(openml: Server, tmp_path: Path, small_mnist: None) -> None:
    mirror = serve_mirror(openml, "/mirror", NAMES[:2])
    acquisition = Acquisition(tmp_path)
    assert acquisition.acquire(folder=None, mirrors=[mirror], openml=True).startswith("OpenML")
    assert contents(acquisition.to) == SMALL
    assert acquisition.reports == [f"{mirror}/{NAMES[2]}.gz: HTTP status 404"]


def test_what_came_of_a_broken_download_lies_apart(openml: Server, tmp_path: Path, small_mnist: None) -> None:
    """A stage refuses files in its outs that are no outs."""
    mirror = serve_mirror(openml, "/mirror", NAMES)
    openml.bodies[f"/mirror/{NAMES[2]}.gz"] = gzip.compress(SMALL[NAMES[2]])[:-1]
    openml.broken.add(f"/mirror/{NAMES[2]}.gz")
    acquisition = Acquisition(tmp_path)
    assert acquisition.acquire(folder=None, mirrors=[mirror], openml=True).startswith("OpenML")
    assert contents(acquisition.to) == SMALL
    assert list(contents(tmp_path / "parts").values()) == [openml.bodies[f"/mirror/{NAMES[2]}.gz"]]


def test_without_a_source_one_line_says_what_to_do(openml: Server, tmp_path: Path, small_mnist: None) -> None:
    openml.bodies = {}
    acquisition = Acquisition(tmp_path)
    with pytest.raises(NoSourceError) as caught:
        acquisition.acquire(folder=tmp_path / "nowhere", mirrors=[f"{openml.base}/mirror"], openml=True)
    assert str(caught.value) == (
        "no source of MNIST answered (asked: MNIST_DIR, mirrors, OpenML): set MNIST_DIR to a folder with the four "
        "IDX files, or set fetch.dataset: digits in params.yaml"
    )
    assert [report.split(":")[0] for report in acquisition.reports] == ["MNIST_DIR", "http", "OpenML"]


def test_openml_is_not_asked_unless_wanted(openml: Server, tmp_path: Path, small_mnist: None) -> None:
    with pytest.raises(NoSourceError, match="set MNIST_DIR"):
        Acquisition(tmp_path).acquire(folder=None, mirrors=[], openml=False)
    assert openml.asked == []


def test_a_mirror_that_is_no_url_is_a_fault_of_the_params(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only http:// and https:// URLs"):
        Acquisition(tmp_path).acquire(folder=None, mirrors=["ftp://mirror"], openml=True)


def test_a_network_that_is_down_is_told_in_one_line_a_host(
    tmp_path: Path, small_mnist: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    acquisition = Acquisition(tmp_path)
    mirrors = ["https://one.invalid/mnist", "http://two.invalid/mnist"]
    with pytest.raises(NoSourceError, match="asked: mirrors, OpenML"):
        acquisition.acquire(folder=None, mirrors=mirrors, openml=True)
    assert len(acquisition.reports) == 3
    assert all(report.endswith("Temporary failure in name resolution") for report in acquisition.reports)
    assert contents(acquisition.to) == {}


# Digits.


@pytest.fixture(scope="module")
def digit_arrays(tmp_path_factory: pytest.TempPathFactory) -> list[npt.NDArray[np.uint8]]:
    to = tmp_path_factory.mktemp("digits")
    digits(to)
    return [read_idx(to / name, shape=(None,) if "labels" in name else (None, 28, 28)) for name in NAMES]


def test_digits_are_the_same_bytes_everywhere(tmp_path: Path) -> None:
    """Change these only together with the digits themselves: every model trained on them changes too."""
    digits(tmp_path)
    assert {name: hashlib.sha256(data).hexdigest()[:16] for name, data in contents(tmp_path).items()} == {
        "train-images-idx3-ubyte": "920fe11b75cb551d",
        "train-labels-idx1-ubyte": "11d2b149fffda136",
        "t10k-images-idx3-ubyte": "fb5102a9e7f67adc",
        "t10k-labels-idx1-ubyte": "4bf083685eb49dca",
    }


def test_digits_are_split_by_class_and_in_order(digit_arrays: list[npt.NDArray[np.uint8]]) -> None:
    _, train_labels, _, test_labels = digit_arrays
    labels = sklearn.datasets.load_digits().target
    assert len(train_labels) + len(test_labels) == len(labels) == 1797
    np.testing.assert_array_equal(np.bincount(test_labels), np.bincount(labels) // 7)
    seen = np.zeros(10, dtype=int)
    expected: tuple[list[int], list[int]] = ([], [])
    for label in labels:
        seen[label] += 1
        expected[bool(seen[label] % 7 == 0)].append(label)
    assert (train_labels.tolist(), test_labels.tolist()) == expected


def test_digits_are_framed_as_mnist_is(digit_arrays: list[npt.NDArray[np.uint8]]) -> None:
    for images in digit_arrays[::2]:
        inside = images[:, 4:24, 4:24]
        assert inside.astype(np.int64).sum() == images.astype(np.int64).sum()
        assert inside.max() == 255
        assert inside.min() == 0


def test_digits_are_enlarged_bilinearly(digit_arrays: list[npt.NDArray[np.uint8]]) -> None:
    """Compare with a plain loop in floating point: within the rounding of a half."""
    bunch = sklearn.datasets.load_digits()
    first = bunch.images[0] * 255 / 16
    for row, column in np.ndindex(20, 20):
        y, x = np.clip((np.array([row, column]) + 0.5) * 0.4 - 0.5, 0, 7)
        top, left = min(int(y), 6), min(int(x), 6)
        dy, dx = y - top, x - left
        upper = first[top, left] * (1 - dx) + first[top, left + 1] * dx
        lower = first[top + 1, left] * (1 - dx) + first[top + 1, left + 1] * dx
        expected = upper * (1 - dy) + lower * dy
        assert abs(digit_arrays[0][0, row + 4, column + 4] - expected) <= 0.5 + 1e-9
