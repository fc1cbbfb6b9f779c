"""DVC's queue of experiments: fill it, start it, and see how far it is.

It is read in this process, which takes a millisecond where `dvc queue status` takes seconds. Only tasks are waited
for, never workers: of two workers one now and then misses the word to stop and stays for ever. The queue is one for
the whole repository: starting it also starts what its owner has queued there.

Waiting for experiments of DVC's queue, with a bar where a person watches and a line a run in a log.
"""

import contextlib
import os
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
from gradtrail.support.progress import ProgressBar, progress_bar
from gradtrail.support.signals import stop_request

_MOST_READS = 4
_PAUSE_SECONDS = 0.5
_QUEUED = re.compile(r"^Queued experiment '([^']+)'", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The names of the experiments in the queue.

    Attributes:
        waiting: not begun.
        running: begun; also those whose worker is no more.
        failed: ended in a fault, at any time.
        is_attended: whether a worker is there.
    """

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    failed: tuple[str, ...]
    is_attended: bool

    @property
    def is_open(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self.waiting or self.running)


class ExperimentQueue:
    """The queue of the repository that we stand in."""

    def __init__(self) -> None:
        from dvc.exceptions import DvcException  # late: it takes half a second
        from dvc.repo import Repo

        try:
            self._queue = Repo().experiments.celery_queue
        except DvcException as error:
            raise UserError(f"DVC's queue cannot be opened: {one_line(error)[:200]}") from error

    def read(self) -> Tasks:
        """Return the tasks as they are now; workers that write meanwhile may make a file unreadable for a moment."""
        for _ in range(_MOST_READS - 1):
            with contextlib.suppress(Exception):  # whatever DVC makes of half a file
                return self._read()
            time.sleep(_PAUSE_SECONDS)
        try:
            return self._read()
        except Exception as error:
            raise UserError(f"DVC's queue cannot be read: {one_line(error)[:200]}") from error

    def _read(self) -> Tasks:
        queue = self._queue
        return Tasks(
            waiting=tuple(_name(entry) for entry in queue.iter_queued()),
            running=tuple(_name(entry) for entry in queue.iter_active()),
            failed=tuple(_name(done.entry) for done in queue.iter_failed()),
            is_attended=any(_is_alive(file) for file in Path(queue.wdir).glob("dvc-exp-worker-*.pid")),
        )

    def start(self, jobs: int) -> None:
        """Start workers, as many as are not there already. They outlive this process, and no pipe may wait for them."""
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [sys.executable, "-m", "dvc", "queue", "start", "--jobs", str(jobs)]
        done = subprocess.run(command, check=False, start_new_session=True, env=_environment(), **streams)
        if done.returncode:
            raise UserError("DVC's queue does not start; `dvc queue start` says why")


def queue_experiments(command: Sequence[str]) -> list[str]:
    """Run a `dvc exp run --queue` line; return the names of the experiments, in the order of their choices.

    DVC puts the working folder's changes aside for a moment: it is let come to its end whoever asks to stop.

    Raises:
        UserError: DVC refuses; its last line.
    """
    with stop_request() as stop:
        options: Any = {"capture_output": True, "text": True, "start_new_session": True}
        done = subprocess.run([sys.executable, "-m", *command], check=False, env=_environment(), **options)
    stop.obey("stopped while experiments were queued")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise UserError(f"DVC queues no experiment: {one_line(said[-1] if said else done.stdout)[:300]}")
    return _QUEUED.findall(done.stdout)


def bring_up_to_date(stage: str) -> int:
    """Run `dvc repro` as far as a stage, all it prints on stderr; return its exit status."""
    command = [sys.executable, "-m", "dvc", "repro", stage]
    return subprocess.run(command, check=False, stdout=sys.stderr.fileno(), env=_environment()).returncode


def _environment() -> dict[str, str]:
    """Return the environment in which DVC, its workers and the stages find this interpreter, whatever the shell has."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix}


def _name(entry: Any) -> str:
    return str(entry.name or entry.stash_rev[:7])


def _is_alive(file: Path) -> bool:
    """Whether the worker is there whose process a file names, and not another process that got its number since."""
    try:
        process = psutil.Process(int(file.read_text()))
        has_ended = process.status() == psutil.STATUS_ZOMBIE
        return not has_ended and any("queue" in word for word in process.cmdline())
    except (OSError, ValueError, psutil.Error):
        return False


_POLL_SECONDS = 2.0
_UNATTENDED_SECONDS = 30.0  # after which there is no worker on its way any more
_MOST_STARTS = 3
_REMOVE = "`dvc queue status` shows them, `dvc queue kill NAME` ends one that only seems to run"


def wait_for(queue: ExperimentQueue, labels: Mapping[str, str], *, jobs: int, title: str) -> list[str]:
    """Start the queue and wait until some of its experiments are done.

    Args:
        queue: that holds them.
        labels: experiment → what to call it.
        jobs: experiments at a time.
        title: of the bar, and before each line.

    Returns:
        The experiments that failed, or that nobody is at work on any more.
    """
    if not labels:
        return []
    queue.start(jobs)
    with progress_bar(title, len(labels), unit="steps") as bar:
        return _Watch(labels, title, bar).until_done(queue, jobs)


class _Watch:
    """Follows experiments, and says which are done."""

    def __init__(self, labels: Mapping[str, str], title: str, bar: ProgressBar):
        self._labels = labels
        self._title = title
        self._bar = bar
        self._open = dict.fromkeys(labels)
        self._num_starts = 1
        self._attended = time.monotonic()

    def until_done(self, queue: ExperimentQueue, jobs: int) -> list[str]:
        while True:
            tasks = queue.read()
            self._show(tasks)
            if not self._open:
                return [name for name in self._labels if name in tasks.failed]
            if self._is_deserted(tasks):
                if not tasks.waiting or self._num_starts == _MOST_STARTS:
                    print(f"{self._title}: no worker is left for {', '.join(self._open)}: {_REMOVE}", file=sys.stderr)
                    return [name for name in self._labels if name in tasks.failed or name in self._open]
                self._num_starts += 1
                queue.start(jobs)
            time.sleep(_POLL_SECONDS)

    def _show(self, tasks: Tasks) -> None:
        still = {*tasks.waiting, *tasks.running}
        for name in [name for name in self._open if name not in still]:
            del self._open[name]
            if not sys.stderr.isatty():
                how = "failed" if name in tasks.failed else "done"
                count = f"{len(self._labels) - len(self._open)} of {len(self._labels)}"
                print(f"{self._title}: {self._labels[name]}: {how} ({count})", file=sys.stderr)
        running = [self._labels[name] for name in tasks.running if name in self._open]
        self._bar.update(len(self._labels) - len(self._open), message="; ".join(running))

    def _is_deserted(self, tasks: Tasks) -> bool:
        """Whether no worker has been there for so long that none will come: a new one takes a while to start."""
        now = time.monotonic()
        is_deserted = not tasks.is_attended and now - self._attended >= _UNATTENDED_SECONDS
        if tasks.is_attended or is_deserted:  # after which another is started, and gets its time
            self._attended = now
        return is_deserted
