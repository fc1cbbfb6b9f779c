"""Each source of a data set delivers the same four verified files; the order of the sources, and their absence.

Most tests let a dozen random images stand for MNIST, under its name. OpenML and files of one's own have modules of
their own.
"""

import gzip
import socket
from pathlib import Path

import pytest
import sklearn.datasets  # type: ignore[import-untyped]
from acquiring import LAST, SMALL, Acquisition, as_files, random_arrays, write_folder
from factories import ROOT
from mirrors import MirrorServer, whole

from gradtrail.stages.artifacts.idx import RAW_FILES
from gradtrail.stages.datasets.catalog import DATASETS
from gradtrail.support.errors import NO_SOURCE_FLAG


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


def test_only_mnist_has_a_stand_in(acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_SOURCE_FLAG, str(tmp_path / "flag"))
    assert acquisition.refusal("fashion_mnist", openml=True) == (
        "no source of Fashion-MNIST to ask, as FASHION_MNIST_DIR is not set: "
        "set FASHION_MNIST_DIR to a folder with the four IDX files"
    )
    assert not (tmp_path / "flag").exists()


# The section of `params.yaml`, and the catalog.


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_is_documented_and_can_be_cited(name: str) -> None:
    entry, page = DATASETS[name], (ROOT / "docs" / "data.md").read_text()
    assert f"`{name}`" in page
    assert entry.folder_variable in page
    assert entry.contents is None or entry.citation in page
    assert f" {name} " in (ROOT / "params.yaml").read_text().split("dataset:")[0]
