"""Waiting for experiments of DVC's queue, with a bar where a person watches and a line a run in a log."""

import sys
import time
from collections.abc import Mapping

from gradtrail.io.experiment_queue import ExperimentQueue, Tasks
from gradtrail.io.progress import ProgressBar, progress_bar

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
