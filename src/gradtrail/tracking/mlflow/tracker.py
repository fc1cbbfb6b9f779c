"""The tracker: a process alongside a stage that logs the stage's run to MLflow.

    python -m gradtrail.tracking.mlflow.tracker FOLDER < messages

It imports MLflow and opens the store while the stage computes. A message is one line of JSON, and names files by their
paths in the folder, which is removed with the tracker. It ends after the message `finish`, after a fault, which it
reports, and as soon as its stage has ended: then the run stays open, like that of any process that was killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtrail.stages.common.pipeline_file import Entry
from gradtrail.support.errors import UserError, is_store_fault, one_line
from gradtrail.support.paths import SQLITE, store_uri
from gradtrail.tracking.lineage.environment import use_stage_environment
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.naming import metric_name
from gradtrail.tracking.tracker_process import READY, REPORTED, warn

if TYPE_CHECKING:
    from gradtrail.tracking.mlflow.stored_run import StoredRun

Message = dict[str, Any]
_MONITOR_AFTER_SECONDS = 60.0  # shorter runs have no use for samples of processor and memory
_SAMPLE_SECONDS = 5.0
SYSTEM_METRICS = (  # a choice of MLflow's five for each GPU and eight others
    *("cpu_utilization_percentage", "system_memory_usage_megabytes"),
    *("gpu_0_utilization_percentage", "gpu_0_memory_usage_megabytes"),
)


class RunLog:
    """Handles the messages of one stage, in their order; see `handle`."""

    def __init__(self) -> None:
        self.is_finished = False
        self._stage: Identity
        self._stored: StoredRun
        self._points: dict[str, dict[int, float]] = {}
        self._monitor_at: float | None = None
        self._stop_monitor: Callable[[], object] | None = None

    def follow(self, inbox: queue.SimpleQueue[Message]) -> None:
        """Handle messages until one says that the run is finished."""
        while not self.is_finished:
            if inbox.empty():
                self._log_curves()
            with contextlib.suppress(queue.Empty):
                self.handle(inbox.get(timeout=self._seconds_to_monitor()))
            if self._seconds_to_monitor() == 0:
                self._start_monitor()

    def handle(self, message: Message) -> None:
        """Handle a message.

        Points of curves are collected until no other message waits, so that a slow store gets many in one request.

        Raises:
            Exception: MLflow failed, or there is a bug.
        """
        if message["do"] != "curves":
            self._log_curves()
        match message:
            case {"do": "open", "stage": name, "entry": entry, "stage_process": description}:
                use_stage_environment(description)
                self._open(Identity(name, read_entries={name: Entry(**entry)}))
            case {"do": "metrics", "values": values}:
                self._log_metrics(values)
            case {"do": "curves", "points": points}:
                for name, curve in points.items():
                    self._points.setdefault(name, {}).update(curve)
            case {"do": "files", "path": path, "under": under}:
                self._stored.log_files(Path(path), under)
            case {"do": "outs"}:
                self._stored.log_outs(self._stage)
                self._stored.link_runs()
            case {"do": "finish", "status": status, "timings": timings, "at": at}:
                if stop := self._stop_monitor:
                    stop()
                self._stored.log_timings(timings, waited=time.time() - at)
                self._stored.client.set_terminated(self._stored.run_id, status)
                self.is_finished = True
            case _:
                raise ValueError(f"no such message: {message}")

    def _open(self, stage: Identity) -> None:
        from gradtrail.tracking.mlflow.client import open_store  # late: stages import this module
        from gradtrail.tracking.mlflow.models import EXPORT
        from gradtrail.tracking.mlflow.stored_run import open_run

        self._stage, self._stored = stage, open_run(open_store(), stage)
        if EXPORT in stage.spec.outs:  # it will log a model: import this now, while the stage works
            with warnings.catch_warnings(action="ignore"):  # about types in a module of MLflow itself
                importlib.import_module("mlflow.pyfunc")
        if stage.runtime.system_metrics:
            self._monitor_at = time.monotonic() + _MONITOR_AFTER_SECONDS

    def _log_metrics(self, values: dict[str, float]) -> None:
        """Log values; each attempt adds a point to the metrics of compiling: cold at first, from the cache later."""
        again = self._stored.attempt - 1
        self._stored.log_points(
            {
                metric_name(self._stage.name, key): {again if key.startswith("compile/") else 0: value}
                for key, value in values.items()
            }
        )

    def _log_curves(self) -> None:
        if self._points:
            points, self._points = self._points, {}
            self._stored.log_points(points)

    def _seconds_to_monitor(self) -> float | None:
        return None if self._monitor_at is None else max(0.0, self._monitor_at - time.monotonic())

    def _start_monitor(self) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        class Monitor(SystemMetricsMonitor):
            def aggregate_metrics(self) -> dict[str, float]:
                metrics = super().aggregate_metrics()
                return {name: metrics[name] for name in SYSTEM_METRICS if name in metrics}

        monitor = Monitor(self._stored.run_id, sampling_interval=_SAMPLE_SECONDS, resume_logging=True)
        monitor.start()
        self._monitor_at, self._stop_monitor = None, monitor.finish


def report_fault(error: Exception) -> None:
    """Print a warning for a fault of the store or the system, a traceback and a line for a bug."""
    reason = (
        str(error)
        if isinstance(error, UserError)
        else f"MLflow's store failed ({type(error).__name__}: {one_line(error)[:200]})"
    )
    if not (is_store_fault(error) or isinstance(error, UserError)):
        traceback.print_exception(error)
        reason = "logging to MLflow failed because of the bug above"
    warn(reason)


def _import_mlflow() -> None:
    """Import MLflow without the garbage collector, which would take a quarter of the time."""
    gc.disable()
    importlib.import_module("gradtrail.tracking.mlflow.stored_run")
    if store_uri().startswith(SQLITE):
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    gc.freeze()
    gc.enable()


def log_run(inbox: queue.SimpleQueue[Message], when_imported: Callable[[], object] = lambda: None) -> int:
    """Handle the messages of a stage, once MLflow is imported; return the exit status."""
    try:
        _import_mlflow()
        when_imported()
        RunLog().follow(inbox)
    except Exception as error:  # bugs too: they must not cost the work
        report_fault(error)
        return REPORTED
    return 0


def main() -> None:
    """Read messages from stdin and handle them; end at once, without waiting for any thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the stage decides when its run is closed
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    folder = Path(sys.argv[1])
    tempfile.tempdir = str(folder)  # so that nothing remains
    threading.Thread(target=_receive, args=(sys.stdin.buffer, inbox, folder), daemon=True).start()
    _end(folder, log_run(inbox, (folder / READY).touch))


def _receive(lines: Iterable[bytes], inbox: queue.SimpleQueue[Message], folder: Path) -> None:
    """Put messages into the inbox; if they end, maybe within a line, the stage has ended: end at once."""
    with contextlib.suppress(ValueError):
        for line in lines:
            inbox.put(json.loads(line))
    _end(folder, 1)


def _end(folder: Path, status: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
