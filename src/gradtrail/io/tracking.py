"""Rows in MLflow: one for each state, found again by its key, tied to others by the content of files.

The store is an index of the outs, never the truth: whatever goes wrong here costs a warning, not the work.
MLflow itself is imported late, where a row is opened.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from gradtrail.io.errors import one_line
from gradtrail.io.identity import Identity
from gradtrail.io.interruption import stop_request
from gradtrail.io.metric_names import metric_name
from gradtrail.io.stages import Stage
from gradtrail.io.state_locks import only_maker

if TYPE_CHECKING:
    from pathlib import Path

    from gradtrail.core.train_step import TrainState
    from gradtrail.io.rows import StoredRow


class Row:
    """A state's row in MLflow, as a stage sees it. A fault of the store costs one warning; after it, nothing is logged.

    Args:
        stage: whose state this is; what it knows of its identity it has found out once for all who ask.
        stored: the row in the store; None where there is no tracking.
    """

    def __init__(self, stage: Identity, stored: StoredRow | None):
        self.stage = stage
        self.stored = stored

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
        """Log many points at once, without a prefix: name → step → value."""
        self._attempt(lambda stored: stored.log_points(points))

    def checkpoint(self, state: TrainState) -> None:
        """Write an Orbax checkpoint of a training state to the row's artifacts, under `checkpoint/`."""
        self._attempt(lambda stored: stored.log_checkpoint(state))

    def outs(self) -> None:
        """Log everything that the stage wrote: metrics, curves, pictures, tables, digests, and the ties to others."""
        self._attempt(lambda stored: stored.log_outs(self.stage))
        self._attempt(lambda stored: stored.tie())

    def finish(self, status: str) -> None:
        """Close the row."""
        self._attempt(lambda stored: stored.client.set_terminated(stored.run_id, status))

    def _attempt(self, action: Callable[[StoredRow], object]) -> None:
        if self.stored is None:
            return
        try:
            action(self.stored)
        except Exception as error:  # whatever MLflow does, the outs stand
            self.stored = None
            _warn(error)


@contextlib.contextmanager
def tracked(stage: Stage) -> Iterator[Row]:
    """Open the row of the state that `stage` is about to make, and close it with what became of it.

    The row is opened before the work, so that curves are live and system metrics are taken. Only one process at a time
    makes a state: another one waits.
    """
    identity = Identity(stage.name)
    with only_maker(identity):
        with stop_request() as request:  # whoever opens a row closes it
            row = _open(identity)
            stop_monitor = _start_monitor(row)
        status = "FAILED"
        try:
            request.obey(f"stopped; `dvc repro` makes {stage.name} anew")
            yield row
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            with stop_request():
                with contextlib.suppress(Exception):
                    stop_monitor()
                row.finish(status)


def _open(stage: Identity) -> Row:
    if not stage.runtime.tracking:
        return Row(stage, None)
    try:
        from gradtrail.io.rows import open_row
        from gradtrail.io.store import open_store

        return Row(stage, open_row(open_store(), stage))
    except Exception as error:  # whatever MLflow does, the work goes on
        _warn(error)
        return Row(stage, None)


def _start_monitor(row: Row) -> Callable[[], object]:
    """Take system metrics twice a second, so that short stages have some; return what stops that."""
    if row.stored is None or not row.stage.runtime.system_metrics:
        return lambda: None
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)
    monitor = SystemMetricsMonitor(row.stored.run_id, sampling_interval=0.5, resume_logging=True)
    monitor.start()
    return monitor.finish


def _warn(error: Exception) -> None:
    reason = one_line(error)[:200]
    print(
        f"warning: MLflow's store failed ({type(error).__name__}: {reason}); the results stand, "
        "and `gradtrail sync` brings this run in later",
        file=sys.stderr,
    )
