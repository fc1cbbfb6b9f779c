"""DVC's queue of experiments: fills and starts it, and waits for experiments in it.

The queue is read in this process: that takes a millisecond, `dvc queue status` takes seconds. A repository has one
queue, and starting it also starts experiments that were queued before. Experiments use the code and params of the
working folder at the time when they are queued, and continue when this process ends.
"""

import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from gradtrail.stages.common.dvc_cache import require_copies
from gradtrail.stages.common.params import PARAMS, as_options, as_overrides, changed, flatten
from gradtrail.stages.common.yaml_file import parse_yaml, read_yaml
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.git import CommandError, blobs, reason, run, with_interpreter
from gradtrail.support.progress import progress_bar
from gradtrail.support.signals import stop_request

_PAUSE_SECONDS = 0.5
_POLL_SECONDS = 2.0
_STARTUP_SECONDS = 30.0  # longest time until a new worker writes its pid file
_RUN_ALL = "import json, sys; from dvc.cli import main; sys.exit(any(map(main, json.load(sys.stdin))))"
_QUEUED = re.compile(r"^Queued experiment '([^']+)'", re.MULTILINE)
_REMOVE = "`dvc queue status` shows them, `dvc queue kill NAME` removes one whose worker died"
_STILL_RUNNING = (
    "DVC's queue keeps running: `dvc queue status` shows it, `dvc queue stop --kill` stops it, "
    "and the same command waits for the rest"
)


class Tasks(NamedTuple):
    """The names of the experiments in the queue."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]  # started experiments, even if their worker has died since
    failed: tuple[str, ...]  # experiments that failed at any time
    has_worker: bool  # True if a worker is alive


class DvcQueue:
    """Runs experiments in the queue of the working folder, `jobs` of them in parallel."""

    def __init__(self, jobs: int = 1):
        self._jobs = jobs

    def prepare(self) -> None:
        """Wait for experiments that were queued before, and run `dvc repro`; exit with its status if it fails.

        It runs all stages, as an experiment fails if DVC's cache lacks any output that `dvc.lock` names.
        """
        require_copies()
        tasks = self.read()
        self.wait({task: task for task in (*tasks.running, *tasks.waiting)}, "experiments queued before")
        if status := _dvc("repro", stdout=sys.stderr.fileno()).returncode:
            raise SystemExit(status)

    def run(
        self, title: str, planned: Mapping[str, Mapping[str, Any]], missing: Mapping[str, Mapping[str, Any]], stage: str
    ) -> dict[str, str]:
        """Queue the missing experiments and wait for them; return the reason of each failure, by label."""
        del planned
        commands = [["exp", "run", "--queue", *as_options(changes), stage] for changes in missing.values()]
        if missing:
            print(
                f"{title}: DVC queues {len(missing)} experiments and changes files here meanwhile: edit none",
                file=sys.stderr,
            )
        before = read_yaml(PARAMS)
        labels = dict(zip(queue_experiments(commands), missing, strict=True))
        planned_params = {name: changed(before, missing[label]) for name, label in labels.items()}
        self._require_params(json.loads(json.dumps(planned_params)))  # a tuple is a list in the file
        return {labels[name]: f"`dvc queue logs {name}` shows why" for name in self.wait(labels, title)}

    def _require_params(self, expected: Mapping[str, Mapping[str, Any]]) -> None:
        """Remove the new experiments if one has other params: DVC changes the files here while it queues.

        An edit of these seconds may be in an experiment, and gone from the file.
        """
        for entry in (*self._queue.iter_queued(), *self._queue.iter_active()):
            if (name := _name(entry)) not in expected:
                continue
            params, planned = parse_yaml(blobs(entry.stash_rev, [str(PARAMS)])[str(PARAMS)], name), expected[name]
            if params != planned:
                _dvc("queue", "remove", *expected, stdout=subprocess.DEVNULL)
                new, old = flatten(params), flatten(planned)
                edits = as_overrides({key: new[key] for key in new if key not in old or new[key] != old[key]})
                raise UserError(
                    f"{PARAMS} was edited while DVC queued experiments: {', '.join(edits)} got into one, and may be "
                    "gone from the file; look at it, and run the same command again"
                )

    def wait(self, labels: Mapping[str, str], title: str) -> list[str]:
        """Start the queue and wait for experiments (name → label); return those that failed or have no worker left.

        If the worker ends before the queue is empty, another is started, as long as each finishes an experiment.
        """
        if not labels:
            return []
        try:
            self.start()
            return self._follow(labels, title)
        except KeyboardInterrupt:
            print(f"{title}: {_STILL_RUNNING}", file=sys.stderr)
            raise

    def _follow(self, labels: Mapping[str, str], title: str) -> list[str]:
        remaining, last_worker = dict(labels), time.monotonic()
        remaining_at_start = len(labels)
        with progress_bar(title, len(labels), unit="steps") as bar:
            while True:
                tasks = self.read()
                for name in [name for name in remaining if name not in (*tasks.waiting, *tasks.running)]:
                    del remaining[name]
                    how = "failed" if name in tasks.failed else "done"
                    bar.print(f"{title}: {labels[name]}: {how} ({len(labels) - len(remaining)} of {len(labels)})")
                running = [labels[name] for name in tasks.running if name in remaining]
                bar.update(len(labels) - len(remaining), message="; ".join(running))
                if tasks.has_worker:
                    last_worker = time.monotonic()
                is_stuck = time.monotonic() - last_worker >= _STARTUP_SECONDS and not tasks.has_worker
                # A worker that gets an earlier `dvc queue stop` ends after one experiment
                if is_stuck and len(remaining) < remaining_at_start and not remaining.keys().isdisjoint(tasks.waiting):
                    self.start()
                    remaining_at_start, last_worker = len(remaining), time.monotonic()
                    continue
                if remaining and is_stuck:
                    bar.print(f"{title}: no worker is left for {', '.join(remaining)}: {_REMOVE}")
                if not remaining or is_stuck:
                    return [name for name in labels if name in tasks.failed or name in remaining]
                time.sleep(_POLL_SECONDS)

    def start(self) -> None:
        """Start workers. They outlive this process, so they inherit no pipe whose reader would wait."""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        if _dvc("queue", "start", "--jobs", str(self._jobs), start_new_session=True, **streams).returncode:
            raise UserError("DVC's queue cannot be started; `dvc queue start` shows why")

    def read(self, attempts: int = 4) -> Tasks:
        """Return the current tasks; a file that a worker is writing may be unreadable for a moment."""
        try:
            workers = Path(self._queue.wdir).glob("dvc-exp-worker-*.pid")
            return Tasks(
                waiting=tuple(map(_name, self._queue.iter_queued())),
                running=tuple(map(_name, self._queue.iter_active())),
                failed=tuple(_name(done.entry) for done in self._queue.iter_failed()),
                has_worker=any(psutil.pid_exists(int(file.read_text())) for file in workers),
            )
        except Exception as error:  # DVC, which alone runs here, raises all kinds of errors for half a file
            if attempts == 1:
                raise UserError(f"DVC's queue cannot be read: {one_line(error)[:200]}") from error
        time.sleep(_PAUSE_SECONDS)
        return self.read(attempts - 1)

    @functools.cached_property
    def _queue(self) -> Any:
        from dvc.repo import Repo  # late: importing it takes half a second

        return Repo().experiments.celery_queue


def queue_experiments(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run `dvc exp run --queue` commands; return the names of the experiments, in the same order.

    One process runs all commands, as importing DVC takes longer than a command. DVC stashes the changes of the working
    folder while it runs, so a signal to stop takes effect after it has ended.
    """
    command = [sys.executable, "-c", _RUN_ALL]
    with stop_request() as stop:
        try:
            output = run(command, env=with_interpreter(), stdin=json.dumps(commands).encode(), seconds=None).decode()
        except CommandError as error:
            raise UserError(f"DVC did not queue the experiment: {reason(error.output)}") from None
    stop.obey("stopped while experiments were queued")
    return _QUEUED.findall(output)


def _dvc(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "dvc", *arguments], check=False, env=with_interpreter(), **options)


def _name(entry: Any) -> str:
    return str(entry.name or entry.stash_rev[:7])
