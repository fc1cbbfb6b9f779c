"""Servers for the tests of this folder, and a call of `acquire` of which nothing of the environment is known."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from acquiring import CONTENTS, Acquisition, random_arrays, serve_openml
from mirrors import MirrorServer, mirror_server

from gradtrail.stages.datasets.catalog import DATASETS
from gradtrail.stages.fetch import sources
from gradtrail.support.errors import NO_SOURCE_FLAG


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MirrorServer]:
    """A server that is reached without a proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with mirror_server() as server:
        yield server


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> Iterator[MirrorServer]:
    """A server at which scikit-learn finds OpenML, which holds the small files."""
    from sklearn.datasets import _openml  # type: ignore[import-untyped] # late: it takes seconds

    with mirror_server() as server:
        monkeypatch.setattr(sources, "OPENML_URL", server.base())
        for constant in ("_SEARCH_NAME", "_DATA_INFO", "_DATA_FEATURES", "_DATA_QUALITIES"):
            monkeypatch.setattr(_openml, constant, f"{server.base()}/{constant}/{{}}")
        serve_openml(server, random_arrays())
        yield server


@pytest.fixture
def acquisition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Acquisition:
    """Let nothing of the environment say where data are, and the small files be what MNIST and Fashion-MNIST are."""
    for name in ("MNIST_DIR", "FASHION_MNIST_DIR", "IDX_DIR", "http_proxy", "https_proxy", "all_proxy", NO_SOURCE_FLAG):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("mnist", "fashion_mnist"):
        monkeypatch.setitem(DATASETS, name, dataclasses.replace(DATASETS[name], contents=CONTENTS))
    return Acquisition(tmp_path, capsys)
