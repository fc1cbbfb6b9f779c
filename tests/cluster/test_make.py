"""An experiment is published once, and a kill at any moment loses nothing but time."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_repository import SharedRepository, new_request, run_git
from projects import ROOT

from gradtrail.cluster import make
from gradtrail.cluster.child import DvcRun
from gradtrail.cluster.make import make_experiment
from gradtrail.cluster.refs import experiment_ref
from gradtrail.cluster.request import Experiment, Request
from gradtrail.support.errors import UserError
from gradtrail.support.git import CommandError

EXPERIMENT = Experiment(label="x", name="gradtrail-1", changes={}, stage="train", shared=())
# A stand-in for DVC: an experiment is a commit with a ref, and a line in the journal records its execution.
_CHILD = """
import os, subprocess, sys, time
name, ref, journal, seconds = sys.argv[1:]
with open(journal, "a") as file:
    file.write(f"{name} {os.getpid()}\\n")
if seconds == "fails":
    print("train: params.yaml: train.seed: too high for", os.environ["SOME_PASSWORD"])
    sys.exit("ERROR: failed to reproduce 'train'")
time.sleep(float(seconds))
identity = {"GIT_%s_%s" % (who, what): "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
def run(*words):
    env = {**os.environ, **identity}
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True, env=env).stdout.strip()
made = run("commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", name)
run("update-ref", ref, made)
"""


@pytest.fixture
def request_(shared: SharedRepository, tmp_path: Path) -> Request:
    cache = str(tmp_path / "cache")
    return new_request(git_url=shared.url, commit=shared.commit, tracking_uri="sqlite:///nothing.db", cache=cache)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Journal":
    """A stand-in for DVC and MLflow that records executions."""
    journal = Journal(tmp_path / "journal")
    monkeypatch.setattr(DvcRun, "command", property(journal.command))
    monkeypatch.setattr(make, "ensure_runs", lambda *_, **__: journal.when_checking())
    return journal


@dataclasses.dataclass
class Journal:
    path: Path
    seconds: str = "0"
    when_checking: Callable[[], Any] = lambda: None

    def command(self, dvc_run: DvcRun) -> list[str]:
        return [sys.executable, "-c", _CHILD, dvc_run.name, dvc_run.ref, str(self.path), self.seconds]

    def executed(self) -> list[str]:
        return [line.split()[0] for line in self.lines()]

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines()]

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


def test_experiment_is_executed_once(request_: Request, shared: SharedRepository, journal: Journal) -> None:
    assert make_experiment(request_, EXPERIMENT) == "made"
    assert make_experiment(request_, EXPERIMENT) == "there"
    assert journal.executed() == ["gradtrail-1"]
    assert set(shared.refs("refs/exps")) == {experiment_ref(request_.commit, "gradtrail-1")}


def test_of_two_overlapping_executions_one_is_published(
    request_: Request, shared: SharedRepository, journal: Journal
) -> None:
    journal.seconds = "0.8"
    outcomes: list[str] = []
    threads = [threading.Thread(target=lambda: outcomes.append(make_experiment(request_, EXPERIMENT))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) <= {"made", "there"}
    assert "made" in outcomes
    assert len(shared.refs("refs/exps")) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (CommandError("`python -m` failed: x", "ERROR: no such bucket\n"), "no such bucket"),
        (CommandError("`python -m` did not end"), "`python -m` did not end"),
    ],
)
def test_fetch_of_inputs_fails_in_one_line_and_has_no_time_limit(
    request_: Request, shared: SharedRepository, monkeypatch: pytest.MonkeyPatch, fault: CommandError, message: str
) -> None:
    def fail(*_: Any, seconds: float | None, **__: Any) -> None:
        assert seconds is None
        raise fault

    (shared.clone / "dvc.lock").write_text("")
    run_git(shared.clone, "add", "dvc.lock")
    run_git(shared.clone, "commit", "-qm", "locked")
    run_git(shared.clone, "push", "-q", "origin", "HEAD:main")
    monkeypatch.setattr(make, "run", fail)
    remote = dataclasses.replace(request_, cache=None, commit=shared.commit)
    with pytest.raises(UserError, match=f"^the inputs of {shared.commit[:12]} were not fetched: {message}$"):
        make_experiment(remote, EXPERIMENT)


def test_failure_is_one_line_without_secrets_and_can_be_repeated(
    request_: Request, shared: SharedRepository, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "very-secret")
    journal.seconds = "fails"
    with pytest.raises(UserError, match=r"^train: params\.yaml: train\.seed: too high for \*\*\*$"):
        make_experiment(request_, EXPERIMENT)
    assert shared.refs("refs/exps") == {}
    journal.seconds = "0"
    assert make_experiment(request_, EXPERIMENT) == "made"


def test_experiment_equal_to_the_commit_has_no_ref(
    request_: Request, shared: SharedRepository, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DvcRun, "command", property(lambda _: ["true"]))
    assert make_experiment(request_, EXPERIMENT) == "unchanged"
    assert shared.refs("refs/exps") == {}


def test_killed_worker_ends_its_stage_and_the_next_worker_publishes(
    request_: Request, shared: SharedRepository, journal: Journal, tmp_path: Path
) -> None:
    request_.write(tmp_path / "request.json")
    code = _WORKER.format(path=str(tmp_path / "request.json"), journal=str(journal.path), child=_CHILD)
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}"}
    worker = subprocess.Popen([sys.executable, "-c", code], env=env)
    while not journal.executed():
        assert worker.poll() is None
        time.sleep(0.05)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    (child,) = journal.pids()
    deadline = time.monotonic() + 30
    while _is_running(child):
        assert time.monotonic() < deadline, "the stage outlived its worker"
        time.sleep(0.05)
    assert shared.refs("refs/exps") == {}
    assert make_experiment(request_, EXPERIMENT) == "made"
    assert len(shared.refs("refs/exps")) == 1


_WORKER = """
import sys
from pathlib import Path
from gradtrail.cluster import make
from gradtrail.cluster.child import DvcRun
from gradtrail.cluster.request import Experiment, Request
WATCHED = "import os, signal, threading\\n" + '''
def end():
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end, daemon=True).start()
'''
DvcRun.command = property(
    lambda self: [sys.executable, "-c", WATCHED + {child!r}, self.name, self.ref, {journal!r}, "60"]
)
experiment = Experiment(label="x", name="gradtrail-1", changes={{}}, stage="train", shared=())
make.make_experiment(Request.read(Path({path!r})), experiment)
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
