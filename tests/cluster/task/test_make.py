"""An experiment is made once: whoever asks, how often, and whatever is killed on the way."""

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
from cluster_repository import SharedRepository, run_git
from projects import ROOT

from gradtrail.cluster.task import make
from gradtrail.cluster.task.child import Orders
from gradtrail.cluster.task.lease import Lease, Pace, acquire
from gradtrail.cluster.task.make import Patience, experiment_ref, make_experiment
from gradtrail.cluster.task.request import Experiment, Request, own_packages, own_python
from gradtrail.cluster.task.shell import CommandError
from gradtrail.support.errors import UserError

QUICK = Patience(lease=Pace(expires=30, renew=0.2, poll=0.03), store=5.0)
# What DVC would do, in milliseconds: an experiment is a commit with a ref, and a line says that it was executed.
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


def experiment(name: str = "gradtrail-1", *shared: str) -> Experiment:
    return Experiment(label=name, name=name, changes={}, stage="train", shared=shared)


@pytest.fixture
def request_(shared: SharedRepository, tmp_path: Path) -> Request:
    return Request(
        git_url=shared.url,
        commit=shared.commit,
        tracking_uri="sqlite:///nothing.db",
        cache=str(tmp_path / "cache"),
        cpus=1.0,
        gpus=0.0,
        python=own_python(),
        packages=own_packages(),
        experiments=(),
    )


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Journal":
    """Stands for DVC and MLflow; says what was executed."""
    journal = Journal(tmp_path / "journal")
    monkeypatch.setattr(Orders, "command", property(journal.command))
    monkeypatch.setattr(make, "ensure_runs", lambda *_, **__: journal.when_checking())
    return journal


@dataclasses.dataclass
class Journal:
    path: Path
    seconds: str = "0"
    when_checking: Callable[[], Any] = lambda: None

    def command(self, orders: Orders) -> list[str]:
        return [sys.executable, "-c", _CHILD, orders.name, orders.ref, str(self.path), self.seconds]

    def executed(self) -> list[str]:
        return [line.split()[0] for line in self.lines()]

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines()]

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


def test_made_once_and_there_from_then_on(request_: Request, shared: SharedRepository, journal: Journal) -> None:
    assert make_experiment(request_, experiment(), QUICK) == "made"
    assert make_experiment(request_, experiment(), QUICK) == "there"
    assert journal.executed() == ["gradtrail-1"]
    assert set(shared.refs("refs/exps")) == {experiment_ref(request_.commit, "gradtrail-1")}
    assert shared.refs("refs/gradtrail/leases") == {}


def test_two_at_once_execute_it_once(request_: Request, journal: Journal) -> None:
    journal.seconds = "0.8"
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda: said.append(make_experiment(request_, experiment(), QUICK))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert journal.executed() == ["gradtrail-1"]
    assert sorted(said) in (["busy", "busy", "made"], ["busy", "made", "there"], ["made", "there", "there"])
    assert make_experiment(request_, experiment(), QUICK) == "there"


@pytest.mark.slow
def test_a_state_that_two_experiments_share_is_one_s_to_make_and_then_there_for_all(
    request_: Request, shared: SharedRepository, journal: Journal
) -> None:
    journal.seconds = "2"
    first = threading.Thread(target=make_experiment, args=(request_, experiment("gradtrail-1", "training"), QUICK))
    first.start()
    while not journal.executed():
        time.sleep(0.02)
    assert make_experiment(request_, experiment("gradtrail-2", "training"), QUICK) == "busy"
    first.join()
    assert journal.executed() == ["gradtrail-1"]
    (mark,) = shared.refs("refs/gradtrail")
    assert mark.endswith("/training")
    journal.seconds = "0"
    assert make_experiment(request_, experiment("gradtrail-2", "training"), QUICK) == "made"
    assert journal.executed() == ["gradtrail-1", "gradtrail-2"]


def test_a_state_that_was_made_while_its_lease_was_waited_for_is_not_made_again(
    request_: Request, shared: SharedRepository, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*arguments: Any) -> Lease | None:
        monkeypatch.setattr(make, "acquire", acquire)
        assert make_experiment(request_, experiment("gradtrail-1", "training"), QUICK) == "made"
        return acquire(*arguments)

    monkeypatch.setattr(make, "acquire", late)
    assert make_experiment(request_, experiment("gradtrail-2", "training"), QUICK) == "busy"
    assert journal.executed() == ["gradtrail-1"]
    assert shared.refs("refs/gradtrail/leases") == {}
    assert make_experiment(request_, experiment("gradtrail-2", "training"), QUICK) == "made"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (CommandError("`python -m` failed: x", "ERROR: no such bucket\n"), "no such bucket"),
        (CommandError("`python -m` did not end"), "`python -m` did not end"),
    ],
)
def test_inputs_that_cannot_be_fetched_are_one_line_and_nothing_limits_their_time(
    request_: Request, shared: SharedRepository, monkeypatch: pytest.MonkeyPatch, fault: CommandError, said: str
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
    with pytest.raises(UserError, match=f"^the inputs of {shared.commit[:12]} were not fetched: {said}$"):
        make_experiment(remote, experiment(), QUICK)


def test_a_failure_is_its_own_line_publishes_nothing_and_can_be_repeated(
    request_: Request, shared: SharedRepository, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "very-secret")
    journal.seconds = "fails"
    with pytest.raises(UserError, match=r"^train: params\.yaml: train\.seed: too high for \*\*\*$"):
        make_experiment(request_, experiment(), QUICK)
    assert shared.refs("refs/exps") == shared.refs("refs/gradtrail") == {}
    journal.seconds = "0"
    assert make_experiment(request_, experiment(), QUICK) == "made"


def test_a_store_that_stays_away_publishes_nothing(
    request_: Request, shared: SharedRepository, journal: Journal
) -> None:
    def away() -> None:
        raise UserError("MLflow's store failed")

    journal.when_checking = away
    with pytest.raises(UserError, match="MLflow's store failed"):
        make_experiment(request_, experiment(), QUICK)
    assert shared.refs("refs/exps") == shared.refs("refs/gradtrail") == {}
    journal.when_checking = lambda: None
    assert make_experiment(request_, experiment(), QUICK) == "made"


def test_an_experiment_that_is_the_commit_itself_has_no_ref(
    request_: Request, shared: SharedRepository, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Orders, "command", property(lambda _: ["true"]))
    assert make_experiment(request_, experiment(), QUICK) == "unchanged"
    assert shared.refs("refs/exps") == shared.refs("refs/gradtrail") == {}


def test_a_holder_that_was_cut_off_kills_its_work_and_publishes_nothing(
    request_: Request, shared: SharedRepository, journal: Journal
) -> None:
    journal.seconds = "60"
    said: list[str] = []

    def ask() -> None:
        try:
            said.append(make_experiment(request_, experiment(), QUICK))
        except UserError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while not journal.executed():
        time.sleep(0.02)
    (lease,) = shared.refs("refs/gradtrail/leases")
    subprocess.run(["git", "update-ref", "-d", lease], cwd=shared.bare, check=True)
    thread.join(30)
    assert said[0].startswith("the lease on gradtrail-1 was taken over")
    assert shared.refs("refs/exps") == {}


def test_a_worker_that_is_killed_takes_its_stage_along_and_the_next_one_goes_on(
    request_: Request, shared: SharedRepository, journal: Journal, tmp_path: Path
) -> None:
    """The lease of a process of this host that has ended is taken over at once."""
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
    assert make_experiment(request_, experiment(), Patience(lease=Pace(expires=600, renew=100, poll=0.03))) == "made"
    assert len(shared.refs("refs/exps")) == 1


_WORKER = """
import sys
from pathlib import Path
from gradtrail.cluster.task import make
from gradtrail.cluster.task.child import Orders
from gradtrail.cluster.task.request import Experiment, Request
WATCHED = "import os, signal, threading\\n" + '''
def end():
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end, daemon=True).start()
'''
Orders.command = property(
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
