"""DVC's queue gets the missing experiments, and is waited for as long as a worker may run them."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from factories import ROOT

from gradtrail.experiments.compare import queue as module
from gradtrail.experiments.compare.queue import DvcQueue, Tasks
from gradtrail.stages.common.params import PARAMS, changed
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError

UNREADABLE = ValueError("half a file")
LABELS = {"a": "on, seed 0", "b": "off, seed 0"}


def tasks(waiting: str = "", running: str = "", failed: str = "", *, has_worker: bool = True) -> Tasks:
    return Tasks(waiting=tuple(waiting), running=tuple(running), failed=tuple(failed), has_worker=has_worker)


class Queue(DvcQueue):
    """A queue whose states follow each other; the last one stays."""

    def __init__(self, *states: Tasks):
        super().__init__()
        self._states = list(states)
        self.num_starts = 0

    def read(self) -> Tasks:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    def start(self) -> None:
        self.num_starts += 1


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_SECONDS", "_STARTUP_SECONDS", "_PAUSE_SECONDS"):
        monkeypatch.setattr(module, name, 0)


def test_queue_waits_for_its_experiments_and_prints_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    queue = Queue(tasks("ab"), tasks("bx", "a"), tasks("x", "b"), tasks("x", "b"), tasks("x", failed="b"), tasks("x"))
    assert queue.wait(LABELS, "clipping") == ["b"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["clipping: on, seed 0: done (1 of 2)", "clipping: off, seed 0: failed (2 of 2)"]
    assert queue.num_starts == 1
    assert queue.read() == tasks("x"), "a task that was not waited for"


@pytest.mark.parametrize(
    ("states", "failed", "num_starts"),
    [
        ([tasks("b", "a"), tasks("b", has_worker=False), tasks(running="b"), tasks()], [], 2),
        ([tasks("b", "a"), tasks("b", has_worker=False)], ["b"], 2),
        ([tasks("ab", has_worker=False)], ["a", "b"], 1),
        ([tasks(running="b", has_worker=False)], ["b"], 1),
    ],
)
def test_worker_that_ends_early_is_replaced_if_it_finished_an_experiment(
    states: list[Tasks], failed: list[str], num_starts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Queue(*states)
    assert (queue.wait(LABELS, "clipping"), queue.num_starts) == (failed, num_starts)
    remains = f"clipping: no worker is left for {', '.join(failed)}: `dvc queue status` shows them"
    assert (remains in capsys.readouterr().err) == bool(failed)


@pytest.mark.parametrize("num_faults", [3, 4])
def test_incomplete_file_of_the_queue_is_read_again(num_faults: int, tmp_path: Any) -> None:
    faults = [UNREADABLE] * num_faults

    def read() -> list[object]:
        if faults:
            raise faults.pop()
        return []

    queue = DvcQueue()
    queue._queue = SimpleNamespace(iter_queued=read, iter_active=list, iter_failed=list, wdir=tmp_path)
    if num_faults < 4:
        assert queue.read() == tasks(has_worker=False)
    else:
        with pytest.raises(UserError, match=r"^DVC's queue cannot be read: half a file$"):
            queue.read()


NAMES = ["one", "two", "three"]
CHANGES: dict[str, dict[str, Any]] = {
    "a": {"train.clip_norm": 1.0, "train.changes.omit": (3, 5)},
    "b": {"train.clip_norm": None, "train.seed": 2, "report.title": "a, b"},
    "c": {},
}


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of experiments that DVC queued with the params that it should, under three names."""
    commands: list[list[str]] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(module, "queue_experiments", lambda new: commands.extend(new) or NAMES)
    monkeypatch.setattr(module, "blobs", lambda revision, _: {"params.yaml": params_of(CHANGES[revision])})
    return commands


def params_of(changes: dict[str, Any]) -> bytes:
    return json.dumps(changed(read_yaml(PARAMS), changes)).encode()


def queue_of_three() -> Queue:
    queue = Queue(Tasks(waiting=(), running=(), failed=("two",), has_worker=True))
    entries = [SimpleNamespace(name=name, stash_rev=label) for name, label in zip(NAMES, CHANGES, strict=True)]
    queue._queue = SimpleNamespace(iter_queued=lambda: entries[:2], iter_active=lambda: entries[2:])
    return queue


def test_queue_gets_the_changes_as_options(queued: list[list[str]]) -> None:
    assert queue_of_three().run("clip", {}, CHANGES, "evaluate") == {"b": "`dvc queue logs two` shows why"}
    assert [" ".join(command) for command in queued] == [
        "exp run --queue -S train.clip_norm=1.0 -S train.changes.omit=[3,5] evaluate",
        "exp run --queue -S train.clip_norm=null -S train.seed=2 -S report.title='a, b' evaluate",
        "exp run --queue evaluate",
    ]


@pytest.mark.usefixtures("queued")
def test_edit_that_got_into_an_experiment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHANGES, "c", {"train.epochs": 77})
    removed: list[tuple[str, ...]] = []
    monkeypatch.setattr(module, "_dvc", lambda *words, **_: removed.append(words))
    with pytest.raises(UserError, match=r"^params\.yaml was edited while DVC queued experiments: train\.epochs=77 got"):
        queue_of_three().run("clip", {}, CHANGES | {"c": {}}, "evaluate")
    assert removed == [("queue", "remove", "one", "two", "three")]
