"""What a stage has to say about its run: a journal on disk, which is logged to MLflow beside the stage, or later.

A journal is a folder `.gradtrail/journal/<state>/<attempt>/`: one event per line in `events.jsonl`, and copies of the
files to log. The stage imports no MLflow. A process beside it (`logger.py`) reads the journal and logs; the stage waits
for it only at its end. The store is an index of the outputs, so no fault here costs the work: it is one warning, or a
traceback for a bug of this project, and the stage goes on with exit status 0, as DVC would discard complete outputs
otherwise. A journal that is not logged to its end stays, with all that its run needs, and `gradtrail sync` logs it.
A server that is down or slow costs a stage at most `runtime.tracking_seconds`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradtrail
from gradtrail.stages.common.dvc_cache import restoring_outs
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, adapt_variables, require_jax
from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.pipeline_file import TRAIN, Entry, StageSpec
from gradtrail.stages.common.stage import Stage
from gradtrail.support.errors import UserError, is_store_fault, one_line, redacted
from gradtrail.support.paths import SQLITE, private_folder, same_command, store_uri
from gradtrail.support.ranks import is_follower
from gradtrail.support.running_time import peak_memory_bytes, seconds_running
from gradtrail.support.signals import stop_request
from gradtrail.tracking.environment import environment
from gradtrail.tracking.state import Identity, Snapshot, state_lock
from gradtrail.tracking.tags import origin_tags, process_tags
from gradtrail.tracking.working_diff import write_diff

if TYPE_CHECKING:
    from gradtrail.core.nn.models import HostParams
    from gradtrail.core.train.step import TrainState

EVENTS, SYSTEM = "events.jsonl", "system.jsonl"  # what the stage says; the use of processor and memory
IDENTITY, OUTS = "identity.json", "outs"  # the state and those before it; digests and copies of the outputs
DIFF = "git.diff"  # changes in the working folder, if there are any
READY = "ready"  # file that a logger makes after importing MLflow; later delays are the store's
REPORTED = 3  # exit status of a logger after a fault that it reported
EXPORT = "models/export"  # the output that is logged as a model
POLL_SECONDS = 0.02
_LOGGER = "gradtrail.tracking.logger"
_HURRIED_SECONDS = 2.0
_LONGEST_IMPORT_SECONDS = 60.0
_loggers: list[LoggerProcess] = []  # started by `start_logger`, not yet used


def start_logger(module: str) -> None:
    """Start the logger at the beginning of a stage's script, so that both import in parallel.

    The garbage collector pauses until `run_stage`, which also reports bad params. If JAX cannot be imported, this ends
    the script, as `run_stage` is not reached. If another import fails, such as that of code with a wrong line, the
    outputs that DVC removed are restored before Python prints the traceback.

    Args:
        module: `__name__` of the script; nothing is done if it is imported instead of run, nor in a process that only
            helps another one.
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
        flags = load_section("environment", EnvironmentConfig).xla_flags
    except UserError:
        return
    with contextlib.suppress(OSError):
        if runtime.tracking:
            _loggers.append(LoggerProcess())
    try:
        with restoring_outs(stage):
            require_jax(flags)
    except UserError as error:
        print(f"{stage}: {error}", file=sys.stderr)
        sys.exit(2)


def _restore_outs(stage: str, *fault: Any) -> None:
    """Restore the outputs of a stage whose script failed, then print the traceback."""
    with contextlib.suppress(Exception), restoring_outs(stage):
        raise RuntimeError
    sys.__excepthook__(*fault)


class LoggerProcess:
    """The process that logs a journal; it ends with this process at the latest.

    It is in a session of its own: Ctrl-C reaches the stage alone, which then says how its run ended. Its stdin gets the
    name of the journal's folder, and is closed when this process ends, however that happens.
    """

    def __init__(self) -> None:
        own_code = os.pathsep.join([str(Path(gradtrail.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _LOGGER],
            stdin=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": own_code.rstrip(os.pathsep), "JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
        self._stdin: Any = self._process.stdin
        self._is_asked_to_stop = False

    def follow(self, journal: Path) -> None:
        """Let the process log a journal, from now until its end."""
        self._journal = journal
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `wait` reports
            self._stdin.write(f"{journal}\n".encode())

    def hurry(self) -> None:
        """Let `wait` take two seconds at most, if it has a limit. May be called from a signal handler."""
        self._is_asked_to_stop = True

    def wait(self, seconds: float | None) -> bool:
        """Wait until the process has logged the journal; report a failure.

        Args:
            seconds: Longest time to wait for the store, without imports; None for no limit.

        Returns:
            Whether everything is logged.
        """
        began, importing_until = None, time.monotonic() + _LONGEST_IMPORT_SECONDS
        while self._process.poll() is None:
            now = time.monotonic()
            if began is None and (now > importing_until or self._is_asked_to_stop or (self._journal / READY).exists()):
                began = now
            if seconds is not None and began is not None:
                if self._is_asked_to_stop:
                    seconds, self._is_asked_to_stop = min(seconds, now - began + _HURRIED_SECONDS), False
                if now - began >= seconds:
                    warn(f"MLflow's store failed (no response within {seconds:.3g} s, `runtime.tracking_seconds`)")
                    return False
            time.sleep(POLL_SECONDS)
        if self._process.returncode not in (0, REPORTED):
            warn(f"the process that logs to MLflow ended with status {self._process.returncode}")
        return self._process.returncode == 0

    def close(self) -> None:
        """End the process if it is running."""
        self._process.kill()
        self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_HURRIED_SECONDS)


class Journal:
    """The journal of one execution of a stage."""

    def __init__(self, stage: Identity, logger: LoggerProcess | None):
        self.stage = stage
        self.folder = Path()
        self._logger = logger  # None without tracking: then nothing is written
        self._is_broken = False
        self._num_files = 0
        self._timings = dict[str, Any]()
        self._at_end: list[Callable[[], object]] = []

    @property
    def is_open(self) -> bool:
        """Whether anything is written: False after a fault."""
        return self._logger is not None and not self._is_broken

    def begin(self) -> None:
        """Create the journal, with the commit and the changes in the working folder as they are before an edit."""
        if self._logger is None:
            return
        with self.best_effort():
            attempt = f"{time.time_ns()}-{os.getpid()}"
            self.folder = private_folder() / "journal" / self.stage.state[:32] / attempt
            self.folder.mkdir(parents=True)
            origin = origin_tags()
            if origin.get("git.dirty") == "true":
                write_diff(self.folder / DIFF)
            self._write(
                "begin",
                stage=self.stage.name,
                entry=dataclasses.asdict(self.stage.entry(self.stage.name)),
                environment=environment(),
                tags=process_tags() | origin,
                system_metrics=self.stage.runtime.system_metrics,
            )
            self._logger.follow(self.folder)
        if self._is_broken:
            self._logger.close()
            self._logger = None

    def metrics(self, values: Mapping[str, float]) -> None:
        """Log metrics under the stage's prefix; a point that the run has already is left as it is.

        Each attempt adds a point to the metrics of compiling: cold at first, from the cache later.
        """
        with self.best_effort():
            self._write("metrics", values=dict(values))

    def curves(self, points: Mapping[str, Mapping[int, float]]) -> None:
        """Log many points at once, without a prefix: name → step → value."""
        with self.best_effort():
            self._write("curves", points={name: list(curve.items()) for name, curve in points.items()})

    def alert(self, message: str) -> None:
        """Add a line to the tag `alert` of the run."""
        with self.best_effort():
            self._write("alert", message=message)

    def files(self, path: Path, under: str) -> None:
        """Log a file, or the files of a folder, as they are now, as artifacts; they replace earlier ones."""
        if not self.is_open:
            return
        with self.best_effort():
            copy = self._place(path.name)
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy)
            self._write("files", path=str(copy.relative_to(self.folder)), under=under)

    def checkpoint(self, state: TrainState, weights: HostParams) -> None:
        """Log an Orbax checkpoint of a training state under `checkpoint/`, without the final weights."""
        if not self.is_open:
            return
        with self.best_effort():
            from gradtrail.tracking.checkpoints import save_checkpoint  # late: only training needs Orbax

            folder = self._place("checkpoint")
            save_checkpoint(folder, state, weights)
            self._write("files", path=str(folder.relative_to(self.folder)), under="checkpoint")

    def outs(self) -> None:
        """Log all outputs, once the stage has finished: metrics, curves, figures, tables and digests; link runs."""
        with self.best_effort():
            self._write("outs")

    def timings(self, **values: Any) -> None:
        """Add plain values to the attempt's `timings.json`; see `end` and `compile_report`."""
        self._timings |= values

    def at_end(self, action: Callable[[], object]) -> None:
        """Register an action for the time after the run is closed; it is not done if the stage was stopped."""
        self._at_end.append(action)

    def complete(self) -> None:
        """Do the actions that were registered by `at_end`."""
        for action in self._at_end:
            action()

    def hurry(self) -> None:
        """Wait two more seconds at most for a server, because the process was asked to stop."""
        if self._logger:
            self._logger.hurry()

    def end(self, status: str) -> None:
        """Close the run, as FAILED if not everything was written, and wait until everything is logged.

        If it cannot be logged now, the journal gets what is needed to log it later, whatever happens to the outputs.
        """
        if self._logger is None:
            return
        seconds = None if store_uri().startswith(SQLITE) else self.stage.runtime.tracking_seconds
        with self.best_effort():
            self._write("end", status="FAILED" if self._is_broken else status, timings=self._timings)
            if not self._logger.wait(seconds):
                self._logger.close()
                keep_outs(self.folder, self.stage)

    def _place(self, name: str) -> Path:
        """Return the path of a new file or folder in the journal."""
        self._num_files += 1
        folder = self.folder / "files" / str(self._num_files)
        folder.mkdir(parents=True)
        return folder / name

    def _write(self, event: str, **values: Any) -> None:
        if self._logger is None or (self._is_broken and event != "end"):
            return
        line = json.dumps({"event": event, "time": time.time(), **values}, default=float)  # scalars of NumPy and JAX
        with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

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
def tracked(stage: Stage) -> Iterator[Journal]:
    """Open the journal of the state that `stage` is about to make; its run ends as FINISHED, FAILED or KILLED.

    The run is logged while the stage works, so that curves are live. Only one process at a time makes a state.
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
    with state_lock(identity.name, identity.state), _logger(stage.runtime) as logger:
        journal = Journal(identity, logger)
        journal.begin()
        work_began = time.time()
        status = "FAILED"
        try:
            yield journal
            stage.inputs.require_unchanged()
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            journal.hurry()
            raise
        finally:
            journal.timings(seconds=seconds | {"work": time.time() - work_began}, peak_memory_bytes=peak_memory_bytes())
            with stop_request(journal.hurry) as request:
                journal.end(status)
        request.obey(f"stopped; {same_command()} restarts {stage.name}")
        stage.inputs.require_unchanged()  # once more, as late as possible: DVC reads them after the command has ended
        journal.complete()


@contextlib.contextmanager
def _logger(runtime: RuntimeConfig) -> Iterator[LoggerProcess | None]:
    if not runtime.tracking:
        yield None
        return
    try:
        logger = _loggers.pop() if _loggers else LoggerProcess()
    except OSError as error:  # no process can be started
        report_fault(error)
        yield None
        return
    with contextlib.closing(logger):
        yield logger


def write_identity(journal: Path, stage: Identity) -> None:
    """Write the state of a journal and those before it, as later the working folder has others."""
    names = [*stage.lineage, *([TRAIN] if stage.is_below_training else [])]  # `profile` reads only a training's params
    entries = {name: dataclasses.asdict(stage.entry(name)) for name in names}
    pipeline = {name: dataclasses.asdict(spec) for name, spec in stage.pipeline.items()}
    write_json(journal / IDENTITY, {"name": stage.name, "entries": entries, "pipeline": pipeline})


def read_identity(journal: Path) -> Identity:
    """Return the state of a journal, whose outputs are those that it keeps."""
    content = json.loads((journal / IDENTITY).read_text(encoding="utf-8"))
    pipeline = {name: StageSpec(**spec) for name, spec in content["pipeline"].items()}
    entries = {name: Entry(**entry) for name, entry in content["entries"].items()}
    snapshot = Snapshot(pipeline=pipeline, lock={})
    return Identity(content["name"], read_entries=entries, snapshot=snapshot, place=journal / OUTS)


def keep_outs(journal: Path, stage: Identity) -> None:
    """Keep what is needed to log a run later: the states before it, and the outputs of which it has more than digests.

    All is on the disk when this returns, so that it survives a loss of power.
    """
    if not (journal / IDENTITY).exists():
        write_identity(journal, stage)
    if '"event": "outs"' in (journal / EVENTS).read_text(encoding="utf-8"):
        temporary = journal / f"{OUTS}.new"
        for out in stage.spec.outs:
            if not is_referenced(stage, out):
                (temporary / out).parent.mkdir(parents=True, exist_ok=True)
                source = stage.folder / out
                (shutil.copytree if source.is_dir() else shutil.copyfile)(source, temporary / out)
        write_json(journal / f"{OUTS}.json", stage.out_digests())
        temporary.rename(journal / OUTS)
    for path in (*journal.rglob("*"), journal):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_referenced(stage: Stage, out: str) -> bool:
    """Whether a run has only the digest of a file or folder."""
    is_copied = out == EXPORT or stage.runtime.copy_outs
    return out.startswith("data/") or (out.startswith("models/") and not is_copied)


def report_fault(error: Exception) -> None:
    """Print a warning for a fault of the store or the system, a traceback and a line for a bug."""
    if isinstance(error, UserError):
        warn(str(error))
    elif is_store_fault(error):
        warn(f"MLflow's store failed ({type(error).__name__}: {one_line(error)[:200]})")
    else:
        traceback.print_exception(error)
        warn("logging to MLflow failed because of the bug above")


def warn(reason: str) -> None:
    """Print why a run is incomplete, and the consequences."""
    line = f"warning: {reason}; the results are unaffected; `gradtrail sync` completes this run later"
    print(redacted(line), file=sys.stderr)
