"""The tracker as its stage sees it: a process that receives messages and files; the stage waits for it at its end."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gradtrail
from gradtrail.stages.common.dvc_cache import restoring_outs
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, remove_variables, require_jax
from gradtrail.stages.common.params import load_section
from gradtrail.support.errors import UserError
from gradtrail.support.paths import SQLITE, store_uri
from gradtrail.support.ranks import is_follower
from gradtrail.support.secrets import redacted

REPORTED = 3  # exit status of a tracker after a fault that it reported
READY = "ready"  # file that a tracker makes after importing MLflow; later delays are the store's

_MODULE = "gradtrail.tracking.mlflow.tracker"
_MAX_MESSAGES = 10_000  # number that a tracker has not read yet
_HURRIED_SECONDS = 2.0
_LONGEST_IMPORT_SECONDS = 60.0
_SLICE_SECONDS = 0.1  # interval of checks of the limit, which `hurry` may lower


class TrackerProcess:
    """Starts a tracker, which ends with this process at the latest.

    It is in a session of its own: Ctrl-C reaches the stage alone, which then says how its run ended.

    Args:
        seconds: Longest time to wait for the store at the end, without imports; None for no limit.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._waiting_since: float | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="gradtrail-"))
        own_code = os.pathsep.join([str(Path(gradtrail.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(self._folder)],
                stdin=subprocess.PIPE,
                bufsize=0,
                env=os.environ | {"PYTHONPATH": own_code.rstrip(os.pathsep), "JAX_PLATFORMS": "cpu"},
                start_new_session=True,
            )
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._pipe: Any = self._process.stdin
        self._ended = threading.Event()
        self._messages: queue.Queue[bytes] = queue.Queue(_MAX_MESSAGES)
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return not self._ended.is_set()

    def send(self, **message: Any) -> None:
        """Send a message, without waiting for the tracker to read it.

        Raises:
            TimeoutError: The tracker does not read any more.
        """
        try:
            self._messages.put_nowait(json.dumps(message).encode() + b"\n")
        except queue.Full:
            raise TimeoutError(f"{_MAX_MESSAGES:,} messages wait to be logged") from None

    def keep(self, path: Path) -> Path:
        """Copy a file or folder for the tracker; the original may be removed at once."""
        place = Path(tempfile.mkdtemp(dir=self._folder)) / path.name
        if path.is_dir():
            shutil.copytree(path, place)
        else:
            shutil.copyfile(path, place)
        return place

    def hurry(self) -> None:
        """Lower the limit, if there is one, to two more seconds, because the process was asked to stop.

        May be called from a signal handler.
        """
        if self._seconds is not None:
            now = time.monotonic()
            self._waiting_since = self._waiting_since or now
            self._seconds = min(self._seconds, now - self._waiting_since + _HURRIED_SECONDS)

    def wait(self) -> None:
        """Wait until the tracker has ended, but no longer than the limit; report a failure."""
        latest = time.monotonic() + _LONGEST_IMPORT_SECONDS
        while not self._ended.wait(_SLICE_SECONDS):
            if self._waiting_since is None and ((self._folder / READY).exists() or time.monotonic() > latest):
                self._waiting_since = time.monotonic()
            if self._is_timed_out():
                warn(f"MLflow's store failed (no response within {self._seconds:.3g} s, `runtime.tracking_seconds`)")
                return
        status = self._process.returncode
        if status not in (0, REPORTED):
            warn(f"the process that logs to MLflow ended with status {status}")

    def _is_timed_out(self) -> bool:
        if self._seconds is None or self._waiting_since is None:
            return False
        return time.monotonic() - self._waiting_since >= self._seconds

    def close(self) -> None:
        """End the tracker if it is running, and remove its files."""
        self._process.kill()
        self._ended.wait(_HURRIED_SECONDS)  # longer only if the system does not end it
        with contextlib.suppress(queue.Full):  # then it is written to, which fails
            self._messages.put_nowait(b"")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._pipe as pipe:  # an error: the tracker has ended
            while line := self._messages.get():
                rest = memoryview(line)
                while rest:
                    rest = rest[pipe.write(rest) :]

    def _watch(self) -> None:
        self._process.wait()
        self._ended.set()


_started: list[TrackerProcess] = []  # started by `start_tracker`, not yet used


def start_tracker(module: str) -> None:
    """Start the tracker at the beginning of a stage's script, so that both import in parallel.

    The garbage collector pauses until `run_stage`, which also reports bad params. If JAX cannot be imported, this ends
    the script, as `run_stage` is not reached.

    Args:
        module: `__name__` of the script; nothing is done if it is imported instead of run, nor in a process that only
            helps another one.
    """
    if module != "__main__":
        return
    remove_variables()
    if is_follower():
        return
    gc.disable()
    try:
        runtime = load_section("runtime", RuntimeConfig)
        flags = load_section("environment", EnvironmentConfig).xla_flags
    except UserError:
        return
    with contextlib.suppress(UserError, OSError):
        if runtime.tracking:
            _started.append(_start(runtime))
    stage = Path(sys.argv[0]).stem
    try:
        with restoring_outs(stage):
            require_jax(flags)
    except UserError as error:
        print(f"{stage}: {error}", file=sys.stderr)
        sys.exit(2)


def started_tracker(runtime: RuntimeConfig) -> TrackerProcess:
    """Return the tracker that was started, or start it; raise OSError if it cannot be started."""
    return _started.pop() if _started else _start(runtime)


def warn(reason: str) -> None:
    """Print why a run is incomplete, and the consequences."""
    line = f"warning: {reason}; the results are unaffected; `gradtrail sync` rebuilds this run later"
    print(redacted(line), file=sys.stderr)


def _start(runtime: RuntimeConfig) -> TrackerProcess:
    is_database = store_uri().startswith(SQLITE)  # it does not hang, but may be slow with many writers
    return TrackerProcess(None if is_database else runtime.tracking_seconds)
