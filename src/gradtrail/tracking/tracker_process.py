"""The tracker as its stage sees it: a process that gets messages and files, and is waited for at the end alone."""

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
from gradtrail.stages.common.environment import EnvironmentConfig, require_jax
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.support.errors import UserError
from gradtrail.support.paths import SQLITE, store_uri
from gradtrail.support.ranks import is_follower
from gradtrail.support.secrets import redacted

REPORTED = 3  # exit status of a tracker after a fault that it reported
READY = "ready"  # file that a tracker makes when it has imported MLflow: what it takes from then on is the store's

_MODULE = "gradtrail.tracking.mlflow.tracker"
_MAX_MESSAGES = 10_000  # messages that a tracker has not read yet
_HURRIED_SECONDS = 2.0
_LONGEST_IMPORT_SECONDS = 60.0
_SLICE_SECONDS = 0.1  # after which whoever waits checks the limit, which `hurry` may have lowered


class TrackerProcess:
    """Starts a tracker, which ends with this process at the latest.

    It is in a session of its own: Ctrl-C reaches the stage alone, which then says how its run ended.

    Args:
        seconds: the longest time to wait at the end for the store, not for Python's imports; None for no limit.
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
        """Whether the process has not ended."""
        return not self._ended.is_set()

    def send(self, **message: Any) -> None:
        """Send a message, without waiting for the tracker to read it.

        Raises:
            TimeoutError: the tracker has stopped to read.
        """
        try:
            self._messages.put_nowait(json.dumps(message).encode() + b"\n")
        except queue.Full:
            raise TimeoutError(f"{_MAX_MESSAGES:,} messages wait to be logged") from None

    def keep(self, path: Path) -> Path:
        """Copy a file or folder to where the tracker finds it, however soon the original goes."""
        place = Path(tempfile.mkdtemp(dir=self._folder)) / path.name
        if path.is_dir():
            shutil.copytree(path, place)
        else:
            shutil.copyfile(path, place)
        return place

    def hurry(self) -> None:
        """Lower the limit to two more seconds, as the process is asked to end; without a limit there remains none.

        May be called from a signal handler.
        """
        if self._seconds is not None:
            now = time.monotonic()
            self._waiting_since = self._waiting_since or now
            self._seconds = min(self._seconds, now - self._waiting_since + _HURRIED_SECONDS)

    def wait(self) -> None:
        """Wait until the tracker has done everything and ended, but no longer than the limit; report what failed."""
        latest = time.monotonic() + _LONGEST_IMPORT_SECONDS
        while not self._ended.wait(_SLICE_SECONDS):
            if self._waiting_since is None and ((self._folder / READY).exists() or time.monotonic() > latest):
                self._waiting_since = time.monotonic()
            if self._is_timed_out():
                how_long = f"no answer within {self._seconds:.3g} s in all; `runtime.tracking_seconds` says how long"
                warn(f"MLflow's store failed ({how_long} a stage waits)")
                return
        status = self._process.returncode
        if status not in (0, REPORTED):
            warn(f"the process that logs to MLflow ended with status {status}")

    def _is_timed_out(self) -> bool:
        if self._seconds is None or self._waiting_since is None:
            return False
        return time.monotonic() - self._waiting_since >= self._seconds

    def close(self) -> None:
        """End the tracker, if it has not ended, and remove its files."""
        self._process.kill()
        self._ended.wait(_HURRIED_SECONDS)  # longer only where the system does not let it go
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


_started: list[TrackerProcess] = []  # before its stage asked for it


def start_tracker(module: str) -> None:
    """Start the tracker of a stage whose script begins, so that MLflow is imported beside what the script imports.

    The garbage collector pauses meanwhile; `run_stage` lets it go on. Where params are bad, `run_stage` says so. Where
    JAX cannot be imported, this ends the script, as `run_stage` is not reached.

    Args:
        module: `__name__` of the script; nothing is done where it is not run, but imported, nor in a process that only
            helps another one.
    """
    if module != "__main__" or is_follower():
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
    """Return the tracker that was started, or start it; raise OSError where it cannot be."""
    return _started.pop() if _started else _start(runtime)


def warn(reason: str) -> None:
    """Print why a run is not complete, and what follows."""
    line = f"warning: {reason}; the results are unaffected; `gradtrail sync` rebuilds this run later"
    print(redacted(line), file=sys.stderr)


def _start(runtime: RuntimeConfig) -> TrackerProcess:
    is_here = store_uri().startswith(SQLITE)  # a database does not hang, and may take long where many write to it
    return TrackerProcess(None if is_here else runtime.tracking_seconds)
