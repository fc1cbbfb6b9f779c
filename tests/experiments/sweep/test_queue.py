"""Waiting for experiments: as long as a worker may run them, and no longer."""

from types import SimpleNamespace
from typing import Any

import pytest

from gradtrail.experiments.sweep import queue as sweep_queue
from gradtrail.experiments.sweep.queue import ExperimentQueue, Tasks, wait_for
from gradtrail.support.errors import UserError

UNREADABLE = ValueError("half a file")
LABELS = {"a": "on, seed 0", "b": "off, seed 0"}


def tasks(waiting: str = "", running: str = "", failed: str = "", *, has_worker: bool = True) -> Tasks:
    return Tasks(waiting=tuple(waiting), running=tuple(running), failed=tuple(failed), has_worker=has_worker)


class Queue:
    """A queue whose states follow each other; the last one stays."""

    def __init__(self, *states: Tasks):
        self._states = list(states)
        self.starts: list[int] = []

    def read(self) -> Tasks:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    def start(self, jobs: int) -> None:
        self.starts.append(jobs)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_queue, "_POLL_SECONDS", 0)
    monkeypatch.setattr(sweep_queue, "_STARTUP_SECONDS", 0)


def wait(queue: Any, labels: dict[str, str] = LABELS) -> list[str]:
    return wait_for(queue, labels, jobs=2, title="clipping")


def test_queue_waits_for_its_experiments_and_prints_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    queue = Queue(tasks("ab"), tasks("bx", "a"), tasks("x", "b"), tasks("x", "b"), tasks("x", failed="b"), tasks("x"))
    assert wait(queue) == ["b"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["clipping: on, seed 0: done (1 of 2)", "clipping: off, seed 0: failed (2 of 2)"]
    assert queue.starts == [2]
    assert queue.read() == tasks("x"), "a task that was not waited for"


def test_new_workers_start_if_the_old_ones_ended_early() -> None:
    queue = Queue(tasks("ab", has_worker=False), tasks("b", "a"), tasks(has_worker=False))
    assert wait(queue) == []
    assert queue.starts == [2, 2]


@pytest.mark.parametrize(
    ("left", "num_starts"), [(tasks("b", has_worker=False), 3), (tasks("", "b", has_worker=False), 1)]
)
def test_waiting_ends_if_no_worker_starts(left: Tasks, num_starts: int, capsys: pytest.CaptureFixture[str]) -> None:
    queue = Queue(left)
    assert wait(queue) == ["b"]
    assert len(queue.starts) == num_starts
    assert "clipping: no worker is left for b: `dvc queue status` shows them" in capsys.readouterr().err


class Reader(ExperimentQueue):
    """A queue over one of DVC's that fails this often."""

    def __init__(self, *faults: Exception):
        left = [*faults]

        def read() -> list[object]:
            if left:
                raise left.pop(0)
            return []

        self._queue = SimpleNamespace(iter_queued=read, iter_active=list, iter_failed=list)


def test_incomplete_file_of_the_queue_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_queue, "_PAUSE_SECONDS", 0)
    assert Reader(*[UNREADABLE] * 3)._entries() == ([], [], [])
    with pytest.raises(UserError, match=r"^DVC's queue cannot be read: half a file$"):
        Reader(*[UNREADABLE] * 4)._entries()
