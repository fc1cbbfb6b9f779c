"""The run of a stage that works: it is recorded on disk, and a process beside the stage ships the record to MLflow.

The stage imports no MLflow, and does not wait, but for a server, which this machine may not outlive:
`runtime.tracking_seconds` at most. No fault here costs the work: it is one warning, or a traceback for a bug of this
project, and the exit status is 0, as DVC would discard complete outputs otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil
from filelock import Timeout

import gradtrail
from gradtrail.stages.common.dvc_cache import restoring_outs
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, adapt_variables, require_jax
from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.stages.common.stage import Stage
from gradtrail.support.accelerator import gpu_use
from gradtrail.support.errors import UserError, is_store_fault, one_line, redacted
from gradtrail.support.goodput import Stopwatch, seconds_by_cause
from gradtrail.support.paths import SQLITE, is_copy, private_folder, root, same_command, store_uri
from gradtrail.support.ranks import is_follower
from gradtrail.support.running_time import peak_memory_bytes, seconds_running
from gradtrail.support.signals import stop_request
from gradtrail.tracking.environment import environment
from gradtrail.tracking.names import metric_name
from gradtrail.tracking.record import (
    ATTEMPT,
    FAILED,
    FINISHED,
    KILLED,
    Points,
    Record,
    RunInfo,
    new_record,
    shipper_lock,
    take_notices,
)
from gradtrail.tracking.state import State, WorkingState, state_lock
from gradtrail.tracking.tags import ALERT, origin_tags, process_tags
from gradtrail.tracking.working_diff import write_diff

if TYPE_CHECKING:
    from gradtrail.core.train.step import TrainState

OUTPUT = "output.txt"  # artifact: what the stage printed
_SAMPLE_AFTER_SECONDS, _SAMPLE_SECONDS = 60.0, 5.0  # shorter runs have no use for samples of processor and memory
_started: list[subprocess.Popen[bytes]] = []  # shippers, by this process
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def start_shipper(module: str) -> None:
    """Start the process that ships records at the beginning of a stage's script, so that both import in parallel.

    Nothing is done in a process that only helps another one. `run_stage` starts the garbage collector again, and
    reports bad params; it is not reached if JAX cannot be imported, or another import fails, such as that of code with
    a wrong line: then the outputs that DVC removed are restored.

    Args:
        module: `__name__` of the script; nothing is done if it is imported instead of run.
    """
    if module != "__main__":
        return
    adapt_variables()
    if is_follower():
        return
    gc.disable()
    stage = Path(sys.argv[0]).stem
    sys.excepthook = functools.partial(_restore_outs, stage)
    try:
        runtime = load_section("runtime", RuntimeConfig)
        flags = load_section("environment", EnvironmentConfig).all_flags
    except UserError:
        return
    if runtime.tracking:
        with contextlib.suppress(OSError, UserError):
            ensure_shipper()
    try:
        with restoring_outs(stage):
            require_jax(flags)
    except UserError as error:
        print(f"{stage}: {error}", file=sys.stderr)
        sys.exit(2)


def _restore_outs(stage: str, *fault: Any) -> None:
    with contextlib.suppress(Exception), restoring_outs(stage):
        raise RuntimeError
    sys.__excepthook__(*fault)


def ensure_shipper() -> None:
    """Start a process that ships records, in a session of its own, unless one is at work.

    It outlives the stage: it runs in the root with the root's code, and has none of the stage's streams, so that who
    reads what a stage prints does not wait for it.
    """
    try:
        shipper_lock().acquire(timeout=0).lock.release()
    except Timeout:
        return
    code = root() / "src" if is_copy() else Path(gradtrail.__file__).parents[1]
    path = os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "DVC_ROOT": str(root())}
    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = [sys.executable, "-P", "-m", "gradtrail.tracking"]
    _started.append(subprocess.Popen(command, cwd=root(), env=env, start_new_session=True, **streams))


class LiveRun:
    """The run of one execution of a stage, with the commit and the changes in the working folder before an edit.

    Args:
        stage: The state that the execution makes.
        record: Record of the execution; None without tracking, then nothing is written.
        stopwatch: Time of the execution.
    """

    def __init__(self, stage: State, record: Record | None, stopwatch: Stopwatch):
        self.stage, self.stopwatch = stage, stopwatch
        self._record = record
        self._described: Future[RunInfo]
        self._finished: RunInfo | None = None
        self._is_broken = False
        self._has_outs = False
        self._is_hurried = False
        self._alerts: list[str] = []
        self._timings = dict[str, Any]()
        self._at_end: list[Callable[[], object]] = []
        self._record_by(self._begin)

    @property
    def is_open(self) -> bool:
        """Whether anything is written: False after a fault."""
        return self._record is not None and not self._is_broken

    def metrics(self, values: Mapping[str, float]) -> None:
        """Record metrics that were measured, under the stage's prefix: each attempt adds a point, the last one counts.

        Those of compiling are cold at first, and from the cache later.
        """
        self.curves({metric_name(self.stage.name, key): {None: value} for key, value in values.items()})

    def curves(self, points: Points) -> None:
        """Record many points at once, without a prefix."""
        self._record_by(lambda record: record.add_points(points))

    def alert(self, message: str) -> None:
        """Add a line to the tag `alert` of the run."""
        self._alerts.append(message)
        self._record_by(lambda record: record.write(self._info()))

    def files(self, path: Path, under: str) -> None:
        """Record the files of a folder, as they are now, as artifacts; they replace earlier ones."""
        self._record_by(lambda record: record.copy(path, under))

    def checkpoint(self, state: TrainState) -> None:
        """Record an Orbax checkpoint of a training state as `checkpoint/`."""
        from gradtrail.tracking.checkpoints import save_checkpoint  # late: only training needs Orbax

        self._record_by(lambda record: save_checkpoint(record.artifacts / "checkpoint", state))

    def outs(self) -> None:
        """Record all outputs once the stage has finished: metrics, curves, figures, tables and digests."""
        self._has_outs = True

    def timings(self, **values: Any) -> None:
        """Add plain values to the attempt's `timings.json`; see `end` and `compile_report`."""
        self._timings |= values

    def at_end(self, action: Callable[[], object]) -> None:
        """Register an action for the time after the run is closed; it is not done if the stage was stopped."""
        self._at_end.append(action)

    def hurry(self) -> None:
        """Wait for no server, because the process was asked to stop: the record is shipped without it."""
        self._is_hurried = True

    def end(self, status: str) -> None:
        """Close the record, as FAILED if not everything was written; all of it is on the disk when this returns."""
        if self._record is None:
            return
        if self._has_outs and status == FINISHED:  # not those of a refused result
            self._record_by(self._add_outs)
        with self.stopwatch.phase("tracking"), self.best_effort():
            self._close(self._record, FAILED if self._is_broken else status)
        for notice in take_notices():
            print(notice, file=sys.stderr)

    def _begin(self, record: Record) -> None:
        """Begin the record, and read the states before this one meanwhile: their data may be large."""
        origin, made = origin_tags(), environment()
        if origin.get("git.dirty") == "true":
            write_diff(record.artifacts / "git.diff")
        tags, began = process_tags() | origin, time.time()

        def describe() -> RunInfo:
            from gradtrail.tracking import render  # late: it imports Pandas, while the stage works

            return render.describe(record, self.stage, tags, made, began)

        pool = ThreadPoolExecutor(1)
        self._described = pool.submit(describe)
        pool.shutdown(wait=False)
        ensure_shipper()

    def _info(self) -> RunInfo:
        """Return what the run is by now."""
        info = self._described.result()
        return dataclasses.replace(info, tags=info.tags | ({ALERT: "\n".join(self._alerts)} if self._alerts else {}))

    def _add_outs(self, record: Record) -> None:
        from gradtrail.tracking.render import add_outs

        self._finished = add_outs(record, self._info(), self.stage, self.stage.out_digests())
        if self.stage.name == TRAIN:
            from gradtrail.tracking.goodput import add_goodput  # late: it imports Matplotlib

            add_goodput(record, self.stopwatch.attempts, self._finished.name, self.stage.runtime.price_per_hour)

    def _close(self, record: Record, status: str) -> None:
        info = self._finished or self._info()
        self._timings |= {
            "seconds": seconds_by_cause(self.stopwatch.attempts),
            "peak_memory_bytes": peak_memory_bytes(),
        }
        timings = json.loads(json.dumps(self._timings, default=float))  # of NumPy's numbers
        write_json(record.folder / ATTEMPT / "timings.json", timings)
        record.flush()
        record.write(dataclasses.replace(info, status=status, ended=time.time(), files=record.digests()))
        self._wait_for_server(record)

    def _wait_for_server(self, record: Record) -> None:
        """Wait until the record is shipped, if the store is a server; warn if that takes too long."""
        began, limit = time.monotonic(), self.stage.runtime.tracking_seconds
        is_local = store_uri().startswith(SQLITE)
        while not (is_local or self._is_hurried) and record.folder.exists() and not record.has_fault:
            if time.monotonic() - began >= limit:
                why = f"MLflow's store failed (no response within {limit:.3g} s, `runtime.tracking_seconds`)"
                print(_warning(why), file=sys.stderr)
                record.tell("")
                break
            time.sleep(0.02)

    @contextlib.contextmanager
    def copied_output(self) -> Iterator[None]:
        """Record what the block prints, and the exception that ends it."""
        if self._record is None:
            yield
            return
        with (self._record.artifacts / OUTPUT).open("w", encoding="utf-8", buffering=1) as file:
            streams: Any = _Copied(sys.stdout, file), _Copied(sys.stderr, file)
            try:
                with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                    yield
            except Exception as error:
                file.write(f"{error}\n" if isinstance(error, UserError) else redacted(traceback.format_exc()))
                raise

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Record the use of processor, memory and GPU while the block runs, from its second minute on."""
        stop = threading.Event()
        if self._record and self.is_open and self.stage.runtime.system_metrics:
            threading.Thread(target=self._sample, args=(self._record, stop), daemon=True).start()
        try:
            yield
        finally:
            stop.set()

    def _sample(self, record: Record, stop: threading.Event) -> None:
        """Record the use of processor, memory and the first GPU, by MLflow's names, until the work ends."""
        seconds = itertools.chain([_SAMPLE_AFTER_SECONDS], itertools.repeat(_SAMPLE_SECONDS))
        psutil.cpu_percent()  # the first call returns 0, each later one the use since the call before
        for step in itertools.takewhile(lambda _: not stop.wait(next(seconds)), itertools.count()):
            values = {
                "cpu_utilization_percentage": psutil.cpu_percent(),
                "system_memory_usage_megabytes": psutil.virtual_memory().used / 1e6,
            }
            if gpu := gpu_use():
                values["gpu_0_utilization_percentage"] = 100 * gpu.utilization
                values["gpu_0_memory_usage_megabytes"] = gpu.memory_bytes / 1e6
            with self.best_effort():  # not by `curves`: the stage does not wait for it
                record.add_points({f"system/{name}": {step: value} for name, value in values.items()})

    def _record_by(self, action: Callable[[Record], object]) -> None:
        """Let an action write the record, unless there is none."""
        if self._record and not self._is_broken:
            with self.stopwatch.phase("tracking"), self.best_effort():
                action(self._record)

    @contextlib.contextmanager
    def best_effort(self) -> Iterator[None]:
        """Run a block that only records: the first exception is reported, and ends the recording, not the stage."""
        try:
            yield
        except Exception as error:  # a bug too: the work counts for more
            if not self._is_broken:
                print(fault_text(error), file=sys.stderr)
            self._is_broken = True


@contextlib.contextmanager
def tracked(stage: Stage) -> Iterator[LiveRun]:
    """Record the run of the state that `stage` is about to make; it ends as FINISHED, FAILED or KILLED.

    The record is shipped while the stage works, so that curves are live. Only one process at a time makes a state.
    """
    identity = WorkingState(stage.name, entries={stage.name: stage.inputs.entry})
    since_imports = time.time() - stage.made_at
    seconds = {"imports": seconds_running() - since_imports, "preparation": since_imports}
    if stage.runtime.trace and not (stage.computes and stage.runtime.tracking):
        off = "MLflow would get the trace, and runtime.tracking is off"
        why = off if stage.computes else "this stage calls no functions of JAX"
        print(f"{stage.name}: runtime.trace: no trace: {why}", file=sys.stderr)
    with state_lock(identity.name, identity.state), contextlib.ExitStack() as stack:
        record, stopwatch = None, Stopwatch(seconds)  # without the time that another process held the lock
        if stage.name == TRAIN:  # which resumes
            stack.enter_context(stopwatch.recording(private_folder() / "resume" / f"{identity.state[:32]}-attempts"))
        try:
            record = new_record(identity.state) if stage.runtime.tracking else None
        except OSError as error:  # a full disk
            print(fault_text(error), file=sys.stderr)
        run = LiveRun(identity, record, stopwatch)
        status = FAILED
        try:
            with run.copied_output(), run.sampled(), stopwatch.phase("other"):
                yield run
                stage.inputs.require_unchanged()
            status = FINISHED
        except KeyboardInterrupt:
            status = KILLED
            run.hurry()
            raise
        finally:
            with stop_request(run.hurry) as request:
                run.end(status)
        request.obey(f"stopped; {same_command()} restarts {stage.name}")
        stage.inputs.require_unchanged()  # once more, as late as possible: DVC reads them after the command has ended
        for action in run._at_end:
            action()


class _Copied:
    """A stream whose lines are also written to a file, as a terminal would show them in the end."""

    def __init__(self, stream: TextIO, file: TextIO):
        self._stream, self._file, self._line = stream, file, ""

    def write(self, text: str) -> int:
        *lines, self._line = f"{self._line}{text}".replace("\r\n", "\n").split("\n")
        for line in lines:
            self._file.write(redacted(_CONTROL.sub("", line.rpartition("\r")[2])) + "\n")
        self._line = self._line.rpartition("\r")[2]
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fault_text(error: Exception) -> str:
    """Return a warning for a fault of the store or the system, a traceback and a line for a bug."""
    if isinstance(error, UserError):
        return _warning(str(error))
    if is_store_fault(error):
        return _warning(f"MLflow's store failed ({type(error).__name__}: {one_line(error)[:200]})")
    return "".join(traceback.format_exception(error)) + _warning("logging to MLflow failed because of the bug above")


def _warning(reason: str) -> str:
    return redacted(f"warning: {reason}; the results are unaffected; `gradtrail sync` completes this run later")
