"""Fills and starts DVC's queue of experiments, and waits for experiments in it.

The queue is read in this process: that takes a millisecond, `dvc queue status` takes seconds. It waits for tasks, never
for workers: one of two workers sometimes misses the signal to stop and never ends. A repository has one queue; starting
it also starts experiments that were queued before.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gradtrail.support.errors import UserError, one_line
from gradtrail.support.interpreter import with_this_interpreter
from gradtrail.support.progress import ProgressBar, progress_bar
from gradtrail.support.signals import stop_request

_MOST_READS = 4
_PAUSE_SECONDS = 0.5
_RUN_ALL = "import json, sys; from dvc.cli import main; sys.exit(any(map(main, json.loads(sys.argv[1]))))"
_QUEUED = re.compile(r"^Queued experiment '([^']+)'", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The names of the experiments in the queue."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]  # started experiments, even if their worker has died since
    failed: tuple[str, ...]  # experiments that failed at any time
    has_worker: bool  # True if a worker is alive

    @property
    def is_open(self) -> bool:
        """Whether an experiment is waiting or running."""
        return bool(self.waiting or self.running)


class ExperimentQueue:
    """The queue of the repository of the working folder."""

    def __init__(self) -> None:
        from dvc.exceptions import DvcException  # late: importing it takes half a second
        from dvc.repo import Repo

        try:
            self._queue = Repo().experiments.celery_queue
        except DvcException as error:
            raise UserError(f"DVC's queue cannot be opened: {one_line(error)[:200]}") from error

    def read(self) -> Tasks:
        """Return the current tasks; a file that a worker is writing may be unreadable for a moment."""
        waiting, running, failed = self._entries()
        return Tasks(
            waiting=tuple(map(_name, waiting)),
            running=tuple(map(_name, running)),
            failed=tuple(_name(done.entry) for done in failed),
            has_worker=any(_is_alive(file) for file in Path(self._queue.wdir).glob("dvc-exp-worker-*.pid")),
        )

    def _entries(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the entries that are queued, are running and have failed, according to DVC."""
        queued, running, failed = self._queue.iter_queued, self._queue.iter_active, self._queue.iter_failed
        for left in reversed(range(_MOST_READS)):
            try:
                return [*queued()], [*running()], [*failed()]
            except Exception as error:  # DVC, which alone runs here, raises all kinds of errors for half a file
                if not left:
                    raise UserError(f"DVC's queue cannot be read: {one_line(error)[:200]}") from error
            time.sleep(_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def start(self, jobs: int) -> None:
        """Start up to `jobs` workers. They outlive this process, so they inherit no pipe whose reader would wait."""
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [sys.executable, "-m", "dvc", "queue", "start", "--jobs", str(jobs)]
        done = subprocess.run(command, check=False, start_new_session=True, env=with_this_interpreter(), **streams)
        if done.returncode:
            raise UserError("DVC's queue cannot be started; `dvc queue start` shows why")


def queue_experiments(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run `dvc exp run --queue` commands; return the names of the experiments, in the same order.

    One process runs all commands, as importing DVC takes longer than a command. DVC stashes the changes of the working
    folder while it runs, so a signal to stop takes effect after it has ended.

    Raises:
        UserError: DVC fails; the message is its last line.
    """
    with stop_request() as stop:
        options: Any = {"capture_output": True, "text": True, "start_new_session": True}
        words = [sys.executable, "-c", _RUN_ALL, json.dumps(commands)]
        done = subprocess.run(words, check=False, env=with_this_interpreter(), **options)
    stop.obey("stopped while experiments were queued")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise UserError(f"DVC did not queue the experiment: {one_line(lines[-1] if lines else done.stdout)[:300]}")
    return _QUEUED.findall(done.stdout)


def bring_up_to_date() -> int:
    """Run `dvc repro`, with all output on stderr; return its exit status.

    It runs all stages, as an experiment fails if DVC's cache lacks any output that `dvc.lock` names.
    """
    command = [sys.executable, "-m", "dvc", "repro"]
    return subprocess.run(command, check=False, stdout=sys.stderr.fileno(), env=with_this_interpreter()).returncode


def _name(entry: Any) -> str:
    return str(entry.name or entry.stash_rev[:7])


def _is_alive(file: Path) -> bool:
    """Whether the worker of a pid file is alive, and its pid not reused by another process."""
    try:
        process = psutil.Process(int(file.read_text()))
        has_ended = process.status() == psutil.STATUS_ZOMBIE
        return not has_ended and any("queue" in word for word in process.cmdline())
    except (OSError, ValueError, psutil.Error):
        return False


_POLL_SECONDS = 2.0
_STARTUP_SECONDS = 30.0  # longest time until a new worker writes its pid file
_MOST_STARTS = 3
_REMOVE = "`dvc queue status` shows them, `dvc queue kill NAME` removes one whose worker died"


def wait_for(queue: ExperimentQueue, labels: Mapping[str, str], *, jobs: int, title: str) -> list[str]:
    """Start the queue and wait until some of its experiments have ended.

    Args:
        queue: Queue with the experiments.
        labels: Experiment → its name in messages.
        jobs: Number of experiments that run in parallel.
        title: Title of the bar, and prefix of each line.

    Returns:
        The experiments that failed or have no worker any more.
    """
    if not labels:
        return []
    queue.start(jobs)
    with progress_bar(title, len(labels), unit="steps") as bar:
        return _Watch(labels, title, bar).until_done(queue, jobs)


class _Watch:
    """Follows experiments, and prints which have ended."""

    def __init__(self, labels: Mapping[str, str], title: str, bar: ProgressBar):
        self._labels = labels
        self._title = title
        self._bar = bar
        self._open = dict.fromkeys(labels)
        self._num_starts = 1
        self._last_worker = time.monotonic()

    def until_done(self, queue: ExperimentQueue, jobs: int) -> list[str]:
        while True:
            tasks = queue.read()
            self._show(tasks)
            if not self._open:
                return [name for name in self._labels if name in tasks.failed]
            if self._has_no_worker(tasks):
                if not tasks.waiting or self._num_starts == _MOST_STARTS:
                    self._bar.print(f"{self._title}: no worker is left for {', '.join(self._open)}: {_REMOVE}")
                    return [name for name in self._labels if name in tasks.failed or name in self._open]
                self._num_starts += 1
                queue.start(jobs)
            time.sleep(_POLL_SECONDS)

    def _show(self, tasks: Tasks) -> None:
        still = {*tasks.waiting, *tasks.running}
        for name in [name for name in self._open if name not in still]:
            del self._open[name]
            how = "failed" if name in tasks.failed else "done"
            count = f"{len(self._labels) - len(self._open)} of {len(self._labels)}"
            self._bar.print(f"{self._title}: {self._labels[name]}: {how} ({count})")
        running = [self._labels[name] for name in tasks.running if name in self._open]
        self._bar.update(len(self._labels) - len(self._open), message="; ".join(running))

    def _has_no_worker(self, tasks: Tasks) -> bool:
        """Whether there has been no worker for longer than the start of one takes."""
        now = time.monotonic()
        has_none = not tasks.has_worker and now - self._last_worker >= _STARTUP_SECONDS
        if tasks.has_worker or has_none:  # then another one is started, with the same time to start
            self._last_worker = now
        return has_none
