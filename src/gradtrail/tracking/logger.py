"""Logs a journal to MLflow: in a process beside the stage that writes it, or later, for `gradtrail sync`.

    python -m gradtrail.tracking.logger < name of the journal's folder

The process imports MLflow and opens the store while the stage computes. It ends after the event `end`, and as soon as
its stage has ended: then the run stays open, like that of any process that was killed. A journal whose run is complete
is removed. After a fault of the store, which is reported, the process only samples processor and memory.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # the collector would take a quarter of the time of the imports

import contextlib
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
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import Timeout
from mlflow import MlflowClient
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.pipeline_file import Entry
from gradtrail.support.errors import UserError
from gradtrail.support.paths import private_folder
from gradtrail.tracking.journal import (
    DIFF,
    EVENTS,
    EXPORT,
    IDENTITY,
    OUTS,
    POLL_SECONDS,
    READY,
    REPORTED,
    SYSTEM,
    read_identity,
    report_fault,
    write_identity,
)
from gradtrail.tracking.names import metric_name
from gradtrail.tracking.state import Identity, lock_file
from gradtrail.tracking.store import open_store
from gradtrail.tracking.stored_run import Points, StoredRun, attempt_file, continue_run, open_run, remove_run
from gradtrail.tracking.tags import ALERT, REPLACED, outputs

Event = dict[str, Any]
_RUN = "run.json"  # the run that a logger opened for the journal
_SAMPLE_AFTER_SECONDS = 60.0  # shorter runs have no use for samples of processor and memory
_SAMPLE_SECONDS = 5.0
SYSTEM_METRICS = (  # a choice of MLflow's five for each GPU and eight others
    *("cpu_utilization_percentage", "system_memory_usage_megabytes"),
    *("gpu_0_utilization_percentage", "gpu_0_memory_usage_megabytes"),
)


class Events:
    """The events in a file that another process may be writing."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[Event]:
        """Yield the whole lines that were written since the last call; none after a line that is not an event."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(whole)
        with contextlib.suppress(ValueError):  # power was lost while it was written
            for line in whole.splitlines():
                yield json.loads(line)


def _place(event: Event) -> int:
    """Return where an event belongs among those of both files: the clock, which may be set, does not say it."""
    return {"begin": 0, "end": 2}.get(event["event"], 1)


class RunLog:
    """Logs the events of a journal, in their order.

    Args:
        journal: Folder of the journal.
        is_live: True beside the stage, which is still writing events; its outputs are in the working folder.
    """

    def __init__(self, journal: Path, *, is_live: bool):
        self._journal = journal
        self._is_live = is_live
        self._is_finished = False
        self._has_outs = False
        self._points: list[tuple[Points, float]] = []
        self._alerts: list[str] = []
        self._stage: Identity
        self._stored: StoredRun

    def log(self) -> None:
        """Log all events until the end; of a stage that was killed, until there are no more.

        Raises:
            Exception: MLflow failed, or there is a bug.
        """
        sources = Events(self._journal / SYSTEM), Events(self._journal / EVENTS)
        while not self._is_finished:
            events = sorted((event for source in sources for event in source.new()), key=_place)
            for event in events:
                self._handle(event)
            self._log_curves()
            if not self._is_live:
                break
            if not events:
                time.sleep(POLL_SECONDS)
        if not self._is_finished:
            self._close("KILLED", events[-1]["time"])

    def _handle(self, event: Event) -> None:
        """Handle an event. Points of curves are collected, so that a slow store gets many in one request."""
        if event["event"] == "curves":
            curves = {name: dict(pairs) for name, pairs in event["points"].items()}
            self._points.append((curves, event["time"]))
            return
        self._log_curves()
        match event:
            case {"event": "begin"}:
                self._open(event)
            case {"event": "metrics", "values": values}:
                self._stored.log_points((self._as_points(values), event["time"]))
            case {"event": "alert", "message": message}:
                self._alerts.append(message)
                self._stored.set_tags({ALERT: "\n".join(self._alerts)})
            case {"event": "files", "path": path, "under": under}:
                self._stored.log_files(self._journal / path, under)
            case {"event": "outs"}:
                self._has_outs = True
            case {"event": "end", "status": status, "timings": timings}:
                if status == "FINISHED" and self._has_outs:  # those of a refused result are not logged
                    self._log_outs()
                if self._is_live:
                    timings["seconds"]["tracking"] = time.time() - event["time"]
                file = attempt_file("timings", self._stored.attempt)
                self._stored.client.log_dict(self._stored.run_id, timings, file)
                self._close(status, event["time"])
            case _:
                raise ValueError(f"no such event: {event}")

    def _open(self, begin: Event) -> None:
        self._begin = begin
        if self._is_live:
            name = begin["stage"]
            self._stage = Identity(name, read_entries={name: Entry(**begin["entry"])})
            write_identity(self._journal, self._stage)
        else:
            self._stage = read_identity(self._journal)
        client, opened = open_store(), self._journal / _RUN
        stored = continue_run(client, self._stage, **json.loads(opened.read_bytes())) if opened.exists() else None
        self._use(stored or self._open_run(client))
        if EXPORT in self._stage.spec.outs:  # it will log a model: import this now, while the stage works
            with warnings.catch_warnings(action="ignore"):  # about types in a module of MLflow itself
                importlib.import_module("mlflow.pyfunc")

    def _open_run(self, client: MlflowClient, *, is_new: bool = False) -> StoredRun:
        begin = self._begin
        return open_run(client, self._stage, begin["tags"], begin["environment"], began=begin["time"], is_new=is_new)

    def _use(self, stored: StoredRun) -> None:
        """Log to a run from now on."""
        self._stored, self._alerts = stored, []
        write_json(self._journal / _RUN, {"run_id": stored.run_id, "attempt": stored.attempt})
        stored.describe(self._stage, self._begin["environment"])
        if (diff := self._journal / DIFF).exists():
            stored.log_files(diff)

    def _close(self, status: str, ended: float) -> None:
        """Close the run; one that any attempt finished stays finished."""
        client, run_id = self._stored.client, self._stored.run_id
        if status != "FINISHED" and outputs(client.get_run(run_id).data.tags):
            status = "FINISHED"
        client.set_terminated(run_id, status, int(ended * 1000))
        self._is_finished = True

    def _as_points(self, values: dict[str, float]) -> Points:
        """Return metrics as points. They were measured, so each attempt adds a point, and the last one counts."""
        step = self._stored.attempt - 1
        return {metric_name(self._stage.name, key): {step: value} for key, value in values.items()}

    def _log_outs(self) -> None:
        """Log the outputs; of a stage that was killed before it ended, they may be those of another state by now."""
        if self._is_live:
            outs = self._stage.out_digests()
        elif (self._journal / OUTS).exists():
            outs = json.loads((self._journal / f"{OUTS}.json").read_bytes())
        else:
            return
        if self._stored.outs not in ({}, outs):
            self._replace_run()
        self._stored.log_outs(self._stage, outs)
        self._stored.mark_as_executed()
        self._stored.link_runs()

    def _replace_run(self) -> None:
        """Replace the run of earlier attempts, which wrote other bytes: no run mixes two results."""
        print(f"{self._stage.name}: an earlier attempt wrote other bytes; a new run replaces its run", file=sys.stderr)
        client, replaced = self._stored.client, self._stored.run_id
        self._use(self._open_run(client, is_new=True))
        for event in (*Events(self._journal / SYSTEM).new(), *Events(self._journal / EVENTS).new()):
            if event["event"] not in ("begin", "outs", "end"):
                self._handle(event)
        self._log_curves()
        client.set_terminated(replaced)
        remove_run(client, client.get_run(replaced), REPLACED, by=self._stored.run_id)

    def _log_curves(self) -> None:
        if self._points:
            points, self._points = self._points, []
            self._stored.log_points(*points)


def log_journals() -> list[str]:
    """Log the journals of stages that have ended, and remove them; return the names of the stages.

    Those of running stages, whose states are locked, are left alone, and so are those that cannot be logged: a warning
    says why.

    Raises:
        Exception: MLflow failed, or there is a bug.
    """
    logged = list[str]()
    for journal in sorted(private_folder().glob("journal/*/*")):
        begin = next(Events(journal / EVENTS).new(), None)
        if begin is None:  # the stage is just beginning it, or was killed as it did
            continue
        try:
            with lock_file(begin["stage"], journal.parent.name).acquire(timeout=0):
                if (journal / IDENTITY).exists():
                    RunLog(journal, is_live=False).log()
                    logged.append(begin["stage"])
                _remove(journal)
        except Timeout:
            continue
        except UserError as error:
            print(f"warning: {begin['stage']}: {journal} cannot be logged: {error}", file=sys.stderr)
    return logged


def _remove(journal: Path) -> None:
    shutil.rmtree(journal, ignore_errors=True)
    with contextlib.suppress(OSError):  # the state has other journals
        journal.parent.rmdir()


def sample_system(journal: Path) -> Iterator[None]:
    """Write the use of processor, memory and GPU to a journal, once for each item that is taken."""
    monitors: list[Any] = [CPUMonitor()]
    with contextlib.suppress(Exception):  # MLflow raises various ones where there is no NVIDIA GPU
        monitors.append(GPUMonitor())
    step = 0
    while True:
        points = dict[str, list[tuple[int, float]]]()
        for monitor in monitors:
            monitor.collect_metrics()
            values = monitor.aggregate_metrics()
            points |= {f"system/{name}": [(step, values[name])] for name in SYSTEM_METRICS if name in values}
            monitor.clear_metrics()
        with (journal / SYSTEM).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": "curves", "time": time.time(), "points": points}) + "\n")
        step += 1
        yield


def main() -> None:
    """Log the journal that stdin names; end at once, without waiting for any thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the stage decides when its run is closed
    inbox: queue.SimpleQueue[Path] = queue.SimpleQueue()
    threading.Thread(target=_read_stdin, args=(inbox,), daemon=True).start()
    journal, status = None, 0
    try:
        open_store()
        gc.freeze()
        gc.enable()
        journal = inbox.get()
        tempfile.tempdir = str(journal)  # so that nothing remains
        (journal / READY).touch()
        threading.Thread(target=_sample, args=(journal,), daemon=True).start()
        RunLog(journal, is_live=True).log()
        _remove(journal)
    except Exception as error:  # bugs too: they must not cost the work
        report_fault(error)
        status = REPORTED
        _wait_for_end(journal or inbox.get())
    _end(status)


def _sample(journal: Path) -> None:
    begin = next(Events(journal / EVENTS).new())
    time.sleep(_SAMPLE_AFTER_SECONDS)
    for _ in sample_system(journal) if begin["system_metrics"] else ():
        time.sleep(_SAMPLE_SECONDS)


def _wait_for_end(journal: Path) -> None:
    events = Events(journal / EVENTS)
    while not any(event["event"] == "end" for event in events.new()):
        time.sleep(POLL_SECONDS)


def _read_stdin(inbox: queue.SimpleQueue[Path]) -> None:
    """Put the journal's folder into the inbox; once the stage has ended, end at once."""
    for line in sys.stdin:
        inbox.put(Path(line.rstrip("\n")))
    _end(1)


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
