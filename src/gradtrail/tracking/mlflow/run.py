"""The run of a stage in MLflow, as the stage sees it: one for each state, looked up by its key.

A process alongside the stage, the tracker, logs the messages of the stage; the stage waits for it only at its end. The
store is an index of the outputs, so no fault here costs the work. A fault of the store or of the system is one warning.
A bug of this project is a traceback on stderr, and the stage goes on too, with exit status 0: if it failed, DVC would
discard complete outputs. After either, nothing more is logged, and `gradtrail sync` rebuilds the run from the outputs.
A server that is down or slow costs a stage at most `runtime.tracking_seconds`.
Out of scope: how the run is logged (`tracker.py`), and what it holds (`stored_run.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtrail.stages.common.stage import Stage
from gradtrail.support.running_time import seconds_running
from gradtrail.support.signals import stop_request
from gradtrail.tracking.lineage.environment import environment
from gradtrail.tracking.lineage.state import Identity, state_lock
from gradtrail.tracking.mlflow.tags import origin_tags, process_tags, write_diff
from gradtrail.tracking.mlflow.tracker import report_fault
from gradtrail.tracking.tracker_process import TrackerProcess, started_tracker

if TYPE_CHECKING:
    from gradtrail.core.nn.models import HostParams
    from gradtrail.core.train.step import TrainState


class TrackedRun:
    """The run of a stage that is executed.

    Args:
        stage: Stage, which computes its state once.
        tracker: Process that logs; None without tracking.
    """

    def __init__(self, stage: Identity, tracker: TrackerProcess | None):
        self.stage = stage
        self._tracker = tracker
        self._is_broken = False
        self._timings = dict[str, Any]()
        self._at_end: list[Callable[[], object]] = []

    @property
    def is_open(self) -> bool:
        """Whether metrics and files are logged: False after a fault."""
        return self._tracker is not None and not self._is_broken and self._tracker.is_alive

    def open(self) -> None:
        """Find or create the run of the state, and count the attempt; read the origin before an edit."""
        if self._tracker is None:
            return
        with self.best_effort(), tempfile.TemporaryDirectory() as folder:
            origin, diff = origin_tags(), Path(folder) / "git.diff"
            is_written = origin.get("git.dirty") == "true" and write_diff(diff)
            description: dict[str, Any] = {"environment": environment(), "tags": process_tags(), "origin": origin}
            description |= {"diff": str(self._tracker.keep(diff))} if is_written else {}
            entry = dataclasses.asdict(self.stage.entry(self.stage.name))
            self._send(do="open", stage=self.stage.name, entry=entry, stage_process=description)
        if self._is_broken:
            self._tracker = None

    def metrics(self, values: Mapping[str, float]) -> None:
        """Log metrics under the stage's prefix; a point that the run has already is left as it is.

        Each attempt adds a point to the metrics of compiling: cold at first, from the cache later.
        """
        with self.best_effort():
            self._send(do="metrics", values={name: float(value) for name, value in values.items()})

    def files(self, path: Path, under: str) -> None:
        """Log a file, or the files of a folder, as they are now, as artifacts; they replace earlier ones."""
        if self._tracker is None or not self.is_open:
            return
        with self.best_effort():
            self._send(do="files", path=str(self._tracker.keep(path)), under=under)

    def curves(self, points: Mapping[str, Mapping[int, float]]) -> None:
        """Log many points at once, without a prefix: name → step → value."""
        with self.best_effort():
            pairs = {
                name: [(int(step), float(value)) for step, value in curve.items()] for name, curve in points.items()
            }
            self._send(do="curves", points=pairs)

    def timings(self, **values: Any) -> None:
        """Add plain values to the attempt's `timings.json`; see `finish` and `compile_report`."""
        self._timings |= values

    def checkpoint(self, state: TrainState, weights: HostParams) -> None:
        """Log an Orbax checkpoint of a training state under `checkpoint/`, without the final weights."""
        if not self.is_open:
            return
        with self.best_effort(), tempfile.TemporaryDirectory() as folder:
            from gradtrail.tracking.mlflow.checkpoints import save_checkpoint  # late: only training needs Orbax

            save_checkpoint(Path(folder) / "checkpoint", state, weights)
            self.files(Path(folder) / "checkpoint", "checkpoint")

    def outs(self) -> None:
        """Log all outputs of the stage: metrics, curves, figures, tables and digests; and link related runs."""
        with self.best_effort():
            self._send(do="outs")

    def at_end(self, action: Callable[[], object]) -> None:
        """Register an action for the time after the run is closed; it is not done if the stage was stopped."""
        self._at_end.append(action)

    def complete(self) -> None:
        """Do the actions that were registered by `at_end`."""
        for action in self._at_end:
            action()

    def finish(self, status: str) -> None:
        """Close the run once everything is logged, and wait for that; as FAILED if not everything was."""
        if self._tracker is None:
            return
        with self.best_effort():
            status = "FAILED" if self._is_broken else status
            self._tracker.send(do="finish", status=status, timings=self._timings, at=time.time())
            self._tracker.wait()

    def _send(self, **message: Any) -> None:
        if self._tracker is not None and not self._is_broken:
            self._tracker.send(**message)

    @contextlib.contextmanager
    def best_effort(self) -> Iterator[None]:
        """Run a block that only logs: the first exception is reported, and ends the logging, not the stage."""
        try:
            yield
        except Exception as error:  # a bug too: the work counts for more
            if not self._is_broken:
                report_fault(error)
            self._is_broken = True


@contextlib.contextmanager
def tracked(stage: Stage) -> Iterator[TrackedRun]:
    """Open the run of the state that `stage` is about to make; close it as FINISHED, FAILED or KILLED.

    The run is opened while the stage works, so that curves are live. Only one process at a time makes a state.
    At its end the stage waits for what is not logged yet: for a server `runtime.tracking_seconds`, and no more than
    another two seconds after a request to stop.
    """
    identity = Identity(stage.name, read_entries={stage.name: stage.inputs.entry})
    since_imports = time.time() - stage.made_at
    seconds = {"imports": seconds_running() - since_imports, "data": since_imports}
    if stage.runtime.trace and not (stage.computes and stage.runtime.tracking):
        off = "MLflow would get the trace, and runtime.tracking is off"
        why = off if stage.computes else "this stage calls no functions of JAX"
        print(f"{stage.name}: runtime.trace: no trace: {why}", file=sys.stderr)
    with state_lock(identity), _tracker(identity) as tracker:
        hurry = tracker.hurry if tracker else lambda: None
        run = TrackedRun(identity, tracker)
        run.open()
        work_began = time.time()
        status = "FAILED"
        try:
            yield run
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            hurry()
            raise
        finally:
            run.timings(seconds=seconds | {"work": time.time() - work_began})
            with stop_request(hurry) as request:
                run.finish(status)
        request.obey(f"stopped; `dvc repro` restarts {stage.name}")
        stage.inputs.require_unchanged()  # once more, as late as possible: DVC reads them after the command has ended
        run.complete()


@contextlib.contextmanager
def _tracker(stage: Identity) -> Iterator[TrackerProcess | None]:
    if not stage.runtime.tracking:
        yield None
        return
    try:
        tracker = started_tracker(stage.runtime)
    except OSError as error:  # the disk is full, or no process can be started
        report_fault(error)
        yield None
        return
    with contextlib.closing(tracker):
        yield tracker
