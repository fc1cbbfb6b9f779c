"""The DVC commands of an experiment, and the fetch of its results; a failing remote is one line."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dvc.cli
import dvc.repo
import pytest
from cluster_repository import SharedRepository, run_git
from dvc.exceptions import DvcException

from gradtrail.cluster import child, home
from gradtrail.cluster.child import DvcRun
from gradtrail.cluster.home import fetch_experiments
from gradtrail.cluster.places import Places
from gradtrail.cluster.refs import experiment_ref

DVC_RUN = DvcRun(
    name="gradtrail-1",
    ref="refs/exps/x",
    options=["-S", "train.seed=1"],
    stage="evaluate",
    pull=False,
    push=True,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of DVC, which are recorded and not executed."""
    calls: list[Any] = []
    monkeypatch.setattr(dvc.cli, "main", lambda words: calls.append(words) or 0)
    monkeypatch.setattr("gradtrail.support.git.git", lambda *_: "0123")
    monkeypatch.setattr(child, "_push_uncached", lambda *_: None)
    pushing(monkeypatch, lambda **how: calls.append(how))
    return calls


def pushing(monkeypatch: pytest.MonkeyPatch, push: Callable[..., Any]) -> None:
    class FakeRepo:
        def __enter__(self) -> "FakeRepo":
            return self

        def __exit__(self, *_: object) -> None: ...

    FakeRepo.push = lambda _, **how: push(**how)  # type: ignore[attr-defined]
    monkeypatch.setattr(dvc.repo, "Repo", FakeRepo)


def test_files_and_run_cache_are_pushed_after_the_run(calls: list[Any]) -> None:
    assert child.main(DVC_RUN) == 0
    run = ["exp", "run", "--temp", "--name", "gradtrail-1", "-S", "train.seed=1", "evaluate"]
    assert calls == [run, {"revs": ["0123"], "workspace": False, "run_cache": True}]


def test_full_remote_is_one_line(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: Any) -> None:
        logging.getLogger("dvc_objects").error("failed to transfer 'md5: 01': QuotaExceeded")
        raise DvcException("2 files failed to upload")

    pushing(monkeypatch, full)
    assert child.main(DVC_RUN) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ERROR: the files were not pushed: 2 files failed to upload; failed to transfer 'md5: 01'")
    assert last.endswith("QuotaExceeded")


@pytest.fixture
def places(shared: SharedRepository, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.chdir(shared.clone)
    run_git(shared.bare, "update-ref", experiment_ref(shared.commit, "gradtrail-1"), shared.commit)
    return Places(commit=shared.commit, remote="origin", git_url=shared.url, tracking_uri="sqlite:///x.db", cache=None)


def fail_with(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise fault

    monkeypatch.setattr(home, "_fetch_listings", fail)


@pytest.mark.parametrize(
    "fault",
    [
        OSError("denied for very-secret\nagain"),
        DvcException("denied for very-secret\nagain"),
        type("ClientError", (Exception,), {"__module__": "botocore.exceptions"})("denied for very-secret\nagain"),
    ],
)
def test_failing_remote_is_a_warning_of_one_line(
    places: Places, fault: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "very-secret")
    fail_with(fault, monkeypatch)
    fetch_experiments(places, ["gradtrail-1"])
    warning = "warning: not all results are fetched yet (denied for *** again); run the same command again\n"
    assert capsys.readouterr().err == warning
    assert run_git(Path(), "rev-parse", experiment_ref(places.commit, "gradtrail-1")) == places.commit


def test_bug_is_raised(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(TypeError("a bug"), monkeypatch)
    with pytest.raises(TypeError):
        fetch_experiments(places, ["gradtrail-1"])
