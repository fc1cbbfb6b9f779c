"""OpenML through scikit-learn: the last source of MNIST, which delivers the same files or one line.

A dozen random images stand for MNIST, under its name.
"""

import socket

import pytest
from acquiring import SMALL, Acquisition, random_arrays, serve_openml
from mirrors import MirrorServer, whole


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


def test_openml_is_used_only_if_enabled(acquisition: Acquisition, internet: MirrorServer) -> None:
    assert "to ask, as MNIST_DIR is not set: set MNIST_DIR" in acquisition.refusal()
    assert internet.requests == []
