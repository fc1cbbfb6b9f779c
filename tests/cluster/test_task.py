"""An experiment is published once, and a kill at any moment loses nothing but time."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dvc.repo
import psutil
import pytest
from cluster_repository import SharedRepository, run_git
from dvc.exceptions import DvcException
from projects import ROOT

from gradtrail.cluster import task
from gradtrail.cluster.request import PlannedExperiment, Request
from gradtrail.cluster.task import make_experiment
from gradtrail.support.errors import UserError
from gradtrail.support.git import CommandError
from gradtrail.tracking.state import Snapshot


@pytest.fixture
def request_(shared: SharedRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Request:
    """A request of a commit that has a stand-in for DVC, whose stage ends at once."""
    monkeypatch.setenv("JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("STAGE_SECONDS", "0")
    return shared.request(tmp_path / "cache")


@pytest.fixture
def experiment(shared: SharedRepository) -> PlannedExperiment:
    ref = f"refs/exps/{shared.commit[:2]}/{shared.commit[2:]}/gradtrail-1"
    return PlannedExperiment(label="x", ref=ref, changes={"train": 2}, stage="train", shared=())


def executed(folder: Path) -> list[list[str]]:
    """Return the processes and arguments of each execution."""
    journal = folder / "journal"
    return [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []


def test_ref_is_created_once(shared: SharedRepository, experiment: PlannedExperiment) -> None:
    first = shared.commit
    run_git(shared.clone, "commit", "-q", "--allow-empty", "-m", "second")
    assert task._publish(shared.url, experiment.ref, first, shared.clone)
    assert not task._publish(shared.url, experiment.ref, shared.commit, shared.clone)
    assert task._publish(shared.url, experiment.ref, first, shared.clone), "a push whose answer was lost is repeated"
    assert shared.refs() == {experiment.ref: first}


def test_failure_is_one_line_without_secrets_and_the_next_call_executes_the_experiment_once(
    request_: Request,
    experiment: PlannedExperiment,
    shared: SharedRepository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "very-secret")
    monkeypatch.setenv("STAGE_SECONDS", "no number")
    with pytest.raises(UserError, match=r"^train: params\.yaml: train\.seed: too high for \*\*\*$"):
        make_experiment(request_, experiment)
    assert shared.refs() == {}
    monkeypatch.setenv("STAGE_SECONDS", "0")
    num_before = len(executed(tmp_path))
    assert make_experiment(request_, experiment) == "done"
    assert make_experiment(request_, experiment) == "done before"
    ((_, _, *words),) = executed(tmp_path)[num_before:]
    assert words == ["exp", "run", "--temp", "--name", "gradtrail-1", "-S", "train=2", "train"]
    assert [*shared.refs()] == [experiment.ref]


_WORKER = """
import sys
from gradtrail.cluster.request import Request
from gradtrail.cluster.task import make_experiment
request = Request.from_json(sys.argv[1])
make_experiment(request, request.experiments[0])
"""


def test_killed_worker_leaves_no_process_and_the_next_worker_publishes(
    request_: Request,
    experiment: PlannedExperiment,
    shared: SharedRepository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Request(**vars(request_) | {"experiments": (experiment,)})
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "STAGE_SECONDS": "60"}
    worker = subprocess.Popen([sys.executable, "-c", _WORKER, request.as_json()], env=env)
    while not executed(tmp_path):
        assert worker.poll() is None
        time.sleep(0.05)
    child, stage, *_ = executed(tmp_path)[0]
    processes = [psutil.Process(int(pid)) for pid in (child, stage)]
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    _, alive = psutil.wait_procs(processes, 30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], "DVC or the stage goes on"
    assert shared.refs() == {}
    assert make_experiment(request_, experiment) == "done"
    assert len(shared.refs()) == 1


def test_checkout_has_the_commit_and_is_clean_when_reused(
    request_: Request, shared: SharedRepository, tmp_path: Path
) -> None:
    places = request_.places
    with task._checkout(places) as folder:
        assert (folder / "file").read_text() == "content"
        assert str(tmp_path / "cache") in (folder / ".dvc" / "config.local").read_text()
        (folder / "file").write_text("changed")
        (folder / "left").write_text("by a killed process")
        (folder / ".git" / "index.lock").touch()
        (folder / ".dvc" / "tmp" / "exps" / "standalone").mkdir(parents=True)
        run_git(folder, "update-ref", "refs/exps/ab/cd/name", "HEAD")
        first = folder
        with task._checkout(places) as other:
            assert other != folder
    (shared.clone / "file").write_text("second")
    run_git(shared.clone, "commit", "-qam", "second")
    later = shared.request(tmp_path).places
    with pytest.raises(CommandError, match=f"reference is not a tree: {shared.commit}$"), task._checkout(later):
        pass
    run_git(shared.clone, "push", "-q", "origin", "HEAD:main")
    with task._checkout(later) as folder:
        assert folder == first
        assert (folder / "file").read_text() == "second"
        assert run_git(folder, "status", "--porcelain") == ""
        assert not (folder / ".dvc" / "tmp" / "exps").exists()
        assert run_git(folder, "for-each-ref", "refs/exps") == ""
        assert run_git(folder, "config", "remote.origin.url") == shared.url


def test_full_remote_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullRepo:
        def __enter__(self) -> "FullRepo":
            return self

        def __exit__(self, *_: object) -> None: ...

        def push(self, **_: Any) -> None:
            try:
                raise OSError("QuotaExceeded")
            except OSError:
                logging.getLogger("dvc_objects").exception("failed to transfer 'md5: 01'")
            raise DvcException("2 files failed to upload")

    monkeypatch.setattr(dvc.repo, "Repo", FullRepo)
    with pytest.raises(
        UserError, match=r"^the files were not pushed: 2 files failed to upload; OSError: QuotaExceeded$"
    ):
        task._push_files("0123", Snapshot(pipeline={}, lock={}))
