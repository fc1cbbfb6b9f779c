"""The run of a stage in MLflow, as the stage sees it: one for each state, found again by its key.

The store is an index of the outs, never the truth, so nothing that goes wrong here costs the work. A fault of the store
or of the system is one warning. A bug of this project is a traceback on stderr, and the stage goes on as well, with
exit status 0: were it to fail, DVC would discard outs that are complete. After either nothing more is logged, and
`gradtrail sync` rebuilds the run from the outs. A server that is down or slow costs a stage
`runtime.tracking_seconds` at most. MLflow itself is imported late, where a run is opened. Out of scope: what a run
holds (`stored_run.py`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gradtrail.stages.common.stage import Stage
from gradtrail.support.errors import UserError, is_store_fault, one_line
from gradtrail.support.paths import SQLITE, store_uri
from gradtrail.support.signals import stop_request
from gradtrail.tracking.lineage.state import Identity, state_lock
from gradtrail.tracking.mlflow.calls import StoreCalls, StoreTooSlowError
from gradtrail.tracking.mlflow.naming import metric_name

if TYPE_CHECKING:
    from gradtrail.core.nn.models import HostParams
    from gradtrail.core.train.step import TrainState
    from gradtrail.tracking.mlflow.stored_run import StoredRun


class TrackedRun:
    """The run of a stage that is at work.

    Args:
        stage: the stage; it computes its state once.
        stored: the run in the store; None without tracking.
        calls: makes the calls of the store.
    """

    def __init__(self, stage: Identity, stored: StoredRun | None, calls: StoreCalls):
        self.stage = stage
        self.stored = stored
        self._calls = calls
        self._waiting: dict[str, dict[int, float]] = {}
        self._stop_monitor: Callable[[], object] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the store gets what is logged: no longer after a fault."""
        return self.stored is not None

    def metrics(self, values: Mapping[str, float]) -> None:
        """Log metrics under the stage's prefix; a point that the run has already is left as it is.

        Each attempt adds a point to the metrics of compiling: cold at first, from the cache later.
        """
        attempt = self.stored.attempt if self.stored else 1
        points = {
            metric_name(self.stage.name, key): {attempt - 1 if key.startswith("compile/") else 0: value}
            for key, value in values.items()
        }
        self._attempt(lambda stored: stored.log_points(points))

    def files(self, path: Path, under: str) -> None:
        """Log a file, or the files of a folder, as artifacts, which replace those of an earlier attempt."""
        self._attempt(lambda stored: stored.log_files(path, under))

    def curves(self, points: Mapping[str, Mapping[int, float]]) -> None:
        """Log many points at once, without a prefix: name → step → value. The work does not wait for the store.

        While the store is busy, points are kept for the next call, or for the end of the stage.
        """
        if self.stored is None:
            return
        for name, curve in points.items():
            self._waiting.setdefault(name, {}).update(curve)
        waiting, log = self._waiting, self.stored.log_points
        with self.best_effort():
            if self._calls.offer(lambda: log(waiting)):
                self._waiting = {}

    def checkpoint(self, state: TrainState, weights: HostParams) -> None:
        """Log an Orbax checkpoint of a training state under `checkpoint/`, without the final weights."""
        if self.stored is None:
            return
        with self.best_effort(), tempfile.TemporaryDirectory() as folder:
            from gradtrail.tracking.mlflow.checkpoints import save_checkpoint  # late: only training needs Orbax

            save_checkpoint(Path(folder) / "checkpoint", state, weights)
            self.files(Path(folder) / "checkpoint", "checkpoint")

    def system_metrics(self) -> None:
        """Sample system metrics twice a second until the run is closed, so that short stages have some."""
        if self.stored is None:
            return
        with self.best_effort():
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            options = {"sampling_interval": 0.5, "resume_logging": True}
            monitor = self._calls.wait(functools.partial(SystemMetricsMonitor, self.stored.run_id, **options))
            monitor.start()
            self._stop_monitor = monitor.finish

    def outs(self) -> None:
        """Log everything that the stage wrote: metrics, curves, figures, tables and digests; and link related runs."""
        waiting, self._waiting = self._waiting, {}
        self._attempt(lambda stored: stored.log_points(waiting))  # only times are lacking: the outs have all others
        self._attempt(lambda stored: stored.log_outs(self.stage))
        self._attempt(lambda stored: stored.link_runs())

    def finish(self, status: str) -> None:
        """Close the run."""
        if stop := self._stop_monitor:
            self._attempt(lambda _: stop())
        if waiting := self._waiting:
            self._attempt(lambda stored: stored.log_points(waiting))
        self._attempt(lambda stored: stored.client.set_terminated(stored.run_id, status))

    def _attempt(self, action: Callable[[StoredRun], object]) -> None:
        if (stored := self.stored) is None:
            return
        with self.best_effort():
            self._calls.wait(lambda: action(stored))

    @contextlib.contextmanager
    def best_effort(self) -> Iterator[None]:
        """Run a block that only logs: an exception in it is reported, and ends the logging, not the stage."""
        try:
            yield
        except Exception as error:  # a bug too: the work counts for more
            self.stored = None
            _report(error)
            self._stop_monitor_later()

    def _stop_monitor_later(self) -> None:
        """End the thread that samples system metrics, without waiting for it."""
        if stop := self._stop_monitor:
            self._stop_monitor = None
            threading.Thread(target=stop, daemon=True).start()


@contextlib.contextmanager
def tracked(stage: Stage) -> Iterator[TrackedRun]:
    """Open the run of the state that `stage` is about to make; close it as FINISHED, FAILED or KILLED.

    The run is opened before the work, so that curves are live and system metrics are sampled. One process at a time
    makes a state; another one waits. The stage waits for a server `runtime.tracking_seconds` in all, and no more than
    another two seconds after a request to stop.
    """
    identity = Identity(stage.name)
    is_here = store_uri().startswith(SQLITE)  # a database does not hang, and may take long where many write to it
    calls = StoreCalls(None if is_here else identity.runtime.tracking_seconds)
    with state_lock(identity):
        with stop_request(calls.hurry) as request:  # a run that was opened is also closed
            run = _open(identity, calls)
            if identity.runtime.system_metrics:
                run.system_metrics()
        status = "FAILED"
        try:
            request.obey(f"stopped; `dvc repro` makes {stage.name} anew")
            yield run
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            calls.hurry()
            raise
        finally:
            with stop_request(calls.hurry):
                run.finish(status)
                calls.close()


def _open(stage: Identity, calls: StoreCalls) -> TrackedRun:
    if not stage.runtime.tracking:
        return TrackedRun(stage, None, calls)
    try:
        from gradtrail.tracking.mlflow.client import open_store
        from gradtrail.tracking.mlflow.stored_run import open_run

        return TrackedRun(stage, calls.wait(lambda: open_run(open_store(), stage)), calls)
    except Exception as error:  # a bug too: the work counts for more
        _report(error)
        return TrackedRun(stage, None, calls)


def _report(error: Exception) -> None:
    """Print a warning for a fault of the store or the system, a traceback and a line for a bug."""
    reason = f"MLflow's store failed ({type(error).__name__}: {one_line(error)[:200]})"
    if isinstance(error, StoreTooSlowError):
        reason = f"MLflow's store failed ({error}; `runtime.tracking_seconds` says how long a stage waits)"
    elif not (is_store_fault(error) or isinstance(error, UserError)):
        traceback.print_exception(error)
        reason = "logging to MLflow failed because of the bug above"
    print(f"warning: {reason}; the results are unaffected; `gradtrail sync` rebuilds this run later", file=sys.stderr)
