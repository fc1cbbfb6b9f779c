"""Rows in MLflow: one for each state, found again by its key, tied to others by the content of files.

The store is an index of the outs, never the truth: whatever goes wrong here costs a warning, not the work; and a
server that is down, slow or dying costs a stage `runtime.tracking_seconds` at most.
MLflow itself is imported late, where a row is opened.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gradtrail.stages.common.stage import Stage
from gradtrail.support.errors import one_line
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
    """A state's row in MLflow, as a stage sees it. A fault of the store costs one warning; after it, nothing is logged.

    Args:
        stage: whose state this is; what it knows of its identity it has found out once for all who ask.
        stored: the row in the store; None where there is no tracking.
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
        """Whether what is logged arrives in the store."""
        return self.stored is not None

    def metrics(self, values: Mapping[str, float]) -> None:
        """Log figures under the stage's prefix; a point that the row has already is left as it is.

        Those of compiling are another point at each attempt: cold at first, from the cache later.
        """
        attempt = self.stored.attempt if self.stored else 1
        points = {
            metric_name(self.stage.name, key): {attempt - 1 if key.startswith("compile/") else 0: value}
            for key, value in values.items()
        }
        self._attempt(lambda stored: stored.log_points(points))

    def files(self, path: Path, under: str) -> None:
        """Log a file, or the files of a folder, as artifacts, in the place of those of an earlier attempt."""
        self._attempt(lambda stored: stored.log_files(path, under))

    def curves(self, points: Mapping[str, Mapping[int, float]]) -> None:
        """Log many points at once, without a prefix: name → step → value. The work does not wait for it.

        While the store is busy points are kept for the next time, at the latest for the end.
        """
        if self.stored is None:
            return
        for name, curve in points.items():
            self._waiting.setdefault(name, {}).update(curve)
        waiting, log = self._waiting, self.stored.log_points
        with self._one_warning():
            if self._calls.offer(lambda: log(waiting)):
                self._waiting = {}

    def checkpoint(self, state: TrainState, weights: HostParams) -> None:
        """Log an Orbax checkpoint of a training state under `checkpoint/`, without the final weights."""
        if self.stored is None:
            return
        with self._one_warning(), tempfile.TemporaryDirectory() as folder:
            from gradtrail.tracking.mlflow.checkpoints import save_checkpoint  # late: only training needs Orbax

            save_checkpoint(Path(folder) / "checkpoint", state, weights)
            self.files(Path(folder) / "checkpoint", "checkpoint")

    def system_metrics(self) -> None:
        """Take system metrics twice a second until the row is closed, so that short stages have some."""
        if self.stored is None:
            return
        with self._one_warning():
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            options = {"sampling_interval": 0.5, "resume_logging": True}
            monitor = self._calls.wait(functools.partial(SystemMetricsMonitor, self.stored.run_id, **options))
            monitor.start()
            self._stop_monitor = monitor.finish

    def outs(self) -> None:
        """Log everything that the stage wrote: metrics, curves, pictures, tables, digests, and the ties to others."""
        waiting, self._waiting = self._waiting, {}
        self._attempt(lambda stored: stored.log_points(waiting))  # of the clock: the outs have all others
        self._attempt(lambda stored: stored.log_outs(self.stage))
        self._attempt(lambda stored: stored.link_runs())

    def finish(self, status: str) -> None:
        """Close the row."""
        if stop := self._stop_monitor:
            self._attempt(lambda _: stop())
        if waiting := self._waiting:
            self._attempt(lambda stored: stored.log_points(waiting))
        self._attempt(lambda stored: stored.client.set_terminated(stored.run_id, status))

    def _attempt(self, action: Callable[[StoredRun], object]) -> None:
        if (stored := self.stored) is None:
            return
        with self._one_warning():
            self._calls.wait(lambda: action(stored))

    @contextlib.contextmanager
    def _one_warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever MLflow does, the outs stand
            self.stored = None
            _warn(error)
            self._forget_monitor()

    def _forget_monitor(self) -> None:
        """Let the thread that takes system metrics end by itself, without waiting for it."""
        if stop := self._stop_monitor:
            self._stop_monitor = None
            threading.Thread(target=stop, daemon=True).start()


@contextlib.contextmanager
def tracked(stage: Stage) -> Iterator[TrackedRun]:
    """Open the row of the state that `stage` is about to make, and close it with what became of it.

    The row is opened before the work, so that curves are live and system metrics are taken. Only one process at a time
    makes a state: another one waits. For a server the stage waits `runtime.tracking_seconds` in all, and two seconds
    more at most once somebody asked to stop.
    """
    identity = Identity(stage.name)
    is_here = store_uri().startswith(SQLITE)  # which does not hang, and takes what it takes where many write to it
    calls = StoreCalls(None if is_here else identity.runtime.tracking_seconds)
    with state_lock(identity):
        with stop_request(calls.hurry) as request:  # whoever opens a row closes it
            row = _open(identity, calls)
            if identity.runtime.system_metrics:
                row.system_metrics()
        status = "FAILED"
        try:
            request.obey(f"stopped; `dvc repro` makes {stage.name} anew")
            yield row
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            calls.hurry()
            raise
        finally:
            with stop_request(calls.hurry):
                row.finish(status)
                calls.close()


def _open(stage: Identity, calls: StoreCalls) -> TrackedRun:
    if not stage.runtime.tracking:
        return TrackedRun(stage, None, calls)
    try:
        from gradtrail.tracking.mlflow.client import open_store
        from gradtrail.tracking.mlflow.stored_run import open_run

        return TrackedRun(stage, calls.wait(lambda: open_run(open_store(), stage)), calls)
    except Exception as error:  # whatever MLflow does, the work goes on
        _warn(error)
        return TrackedRun(stage, None, calls)


def _warn(error: Exception) -> None:
    reason = f"{type(error).__name__}: {one_line(error)[:200]}"
    if isinstance(error, StoreTooSlowError):
        reason = f"{error}; `runtime.tracking_seconds` says how long a stage waits"
    print(
        f"warning: MLflow's store failed ({reason}); the results stand, and `gradtrail sync` brings this run in later",
        file=sys.stderr,
    )
