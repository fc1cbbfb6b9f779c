"""Starts the processes of a training on this machine, and ends them together: `python -m gradtrail.launch -n 2 …`.

Each is given the address where they meet, on loopback, see `stages/common/processes.py`. Ctrl-C and SIGTERM are passed
on to all. When one fails the others are killed, and where process 0 has not said what happened, this one does, in one
line: of a killed process, of one whose fault is in its log, and of one that stopped answering, for which JAX aborts the
others. Where this one is killed, or its terminal closed, the others get SIGTERM. On several machines a scheduler starts
one launcher on each.
"""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from gradtrail.support.errors import UserError
from gradtrail.support.ranks import ADDRESS, COUNT, INDEX, index_told, log_path

_GRACE_SECONDS = 10.0  # from the first fault or signal, in which process 0 closes its run
_ABORT_SECONDS = 1.0  # from a death or the error of process 0, in which the others end by themselves or JAX aborts them
_POLL_SECONDS = 0.05
_STOPS = (signal.SIGINT, signal.SIGTERM)
_MOST = 1024
_GUARD = 'all=; while read -r pid; do all="$all $pid"; done; kill -TERM $all'  # it reads until this process ends
_JAX_ABORTED = "JAX distributed service detected fatal errors"
_UNMET = "CoordinationService/RegisterTask"
_SILENT = re.compile(r"stopped sending heartbeats\):\s*((?:\d+\s+)+)")
_AGAIN = "`dvc repro` starts again, from the last checkpoint if there is one"


def launch(count: int | None, command: Sequence[str]) -> int:
    """Run a command in so many processes of this machine; return the exit status.

    It is 0; that of a process that ended with an error or was asked to stop; or 2 where one was killed or froze.

    Args:
        count: number of the processes; None for one, as one of those that a scheduler started on several machines.
        command: words of a command, or the module of a stage, such as `pipeline.train`.

    Raises:
        UserError: the count is out of bounds, or the command cannot be started.
    """
    if count is not None and not 1 <= count <= _MOST:
        raise UserError(f"-n must be at least 1 and at most {_MOST:,}, got {count}")
    words = [sys.executable, "-m", *command] if len(command) == 1 and command[0].startswith("pipeline.") else command
    environments = {index_told(): {}} if count is None else _environments(count)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # of an abort by JAX
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with _passing_on(started) as all_started, _guarded() as guard:
            for index, environment in environments.items():
                log_path(index).unlink(missing_ok=True)
                started[index] = subprocess.Popen(words, env=os.environ | environment, start_new_session=True)
                guard(started[index].pid)
            all_started()
            failed = _wait(started)
            if failed is None:
                return 0
            if failed != "0" or started["0"].returncode < 0:
                prefix = f"{command[-1].removeprefix('pipeline.')}: "
                print(f"{prefix}{_describe(failed, started, prefix)}", file=sys.stderr)
            status = started[failed].returncode
            return status if status > 0 else 128 - status if -status in _STOPS else 2
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
    finally:
        for process in started.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def _environments(count: int) -> dict[str, dict[str, str]]:
    """Return for the index of each of so many processes the variables by which JAX connects them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return {str(index): {ADDRESS: address, COUNT: str(count), INDEX: str(index)} for index in range(count)}


def _wait(processes: Mapping[str, subprocess.Popen[bytes]]) -> str | None:
    """Wait until all have ended, or the time is up after the first failure; return the index of the one that failed.

    That is process 0 where it ended with an error by itself, which it has described.
    """
    first, latest = next(iter(processes.values())), float("inf")
    while any(process.poll() is None for process in processes.values()) and time.monotonic() < latest:
        if failed := _first_failed(processes):
            status = processes[failed].returncode
            is_described = status > 0 and failed == "0"
            is_slow = status > 0 or _UNMET in _log(failed)
            seconds = _GRACE_SECONDS if is_slow and not is_described else _ABORT_SECONDS
            latest = min(latest, time.monotonic() + seconds)
        elif first.poll() == 0:  # the outs are written
            latest = min(latest, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return _first_failed(processes)


def _first_failed(processes: Mapping[str, subprocess.Popen[bytes]]) -> str | None:
    """Return the index of the process that failed: the first, but rather one that JAX has not aborted for another."""
    failed = [index for index, process in processes.items() if process.poll()]
    return min(failed, key=lambda index: processes[index].returncode == -signal.SIGABRT, default=None)


def _describe(failed: str, processes: Mapping[str, subprocess.Popen[bytes]], prefix: str) -> str:
    """Return what happened to a process that failed, or to the one for which JAX aborted it.

    Args:
        failed: its index.
        processes: all that this launcher started, by their indices.
        prefix: words that a stage begins its messages with.
    """
    status, log = processes[failed].returncode, _log(failed).strip()
    if status == -signal.SIGABRT and _JAX_ABORTED in log:
        if _UNMET in log:
            missing = [index for index, process in processes.items() if process.returncode is None]
            return f"{_named(missing) or 'another process'} did not join the others within `runtime.join_seconds`"
        silent = _SILENT.search(log)
        return f"{_named(silent[1].split() if silent else ['0'])} stopped answering; {_AGAIN}"
    if status < 0:
        return f"process {failed} was ended by {signal.Signals(-status).name}; {_AGAIN}"
    if not log:
        return f"process {failed} ended with status {status}"
    return f"process {failed}: {log.splitlines()[-1].removeprefix(prefix)}"


def _log(index: str) -> str:
    path = log_path(index)
    return path.read_text(errors="replace") if path.exists() else ""


def _named(indices: Sequence[str]) -> str:
    return f"process{'es' * (len(indices) > 1)} {', '.join(indices)}" if indices else ""


@contextlib.contextmanager
def _passing_on(processes: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[Callable[[], object]]:
    """Pass Ctrl-C and SIGTERM on to all processes while the block runs, and the end of the terminal as SIGTERM.

    Yields what says that all have started: what comes before then is passed on then, to each of them once.
    """
    early: list[int] | None = []

    def pass_on(number: int, _: FrameType | None = None) -> None:
        if early is not None:
            early.append(number)
            return
        for process in processes.values():
            process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def all_started() -> None:
        nonlocal early
        came, early = early or [], None
        for number in came:
            pass_on(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield all_started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _guarded() -> Iterator[Callable[[int], object]]:
    """Yield what has a process, by its id, get SIGTERM where this one ends within the block, even by SIGKILL."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb", buffering=0) as told:
        with os.fdopen(reading) as heard:
            guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD], stdin=heard, stderr=subprocess.DEVNULL, start_new_session=True
            )
        try:
            yield lambda pid: told.write(b"%d\n" % pid)
        finally:
            guard.kill()
            guard.wait()
