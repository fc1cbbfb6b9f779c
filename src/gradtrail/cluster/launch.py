"""Starts the processes of a stage on this machine, and ends them together: `python -m gradtrail.launch -n 2 …`.

Each is told where they meet, on loopback, see `stages/common/processes.py`. Ctrl-C and SIGTERM are passed on to all;
when one process fails the others end by themselves within seconds, and after `_GRACE_SECONDS` they are killed. Which
fault it was process 0 says; where it does not end by itself, this one tells. Where this one is killed, or its terminal
closed, the others get SIGTERM. On several machines a scheduler does all this.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from gradtrail.support.errors import UserError
from gradtrail.support.ranks import ADDRESS, COUNT, INDEX

_GRACE_SECONDS = 10.0  # from the first failure, in which process 0 closes its run
_POLL_SECONDS = 0.05
_MOST = 1024
_GUARD = 'all=; while read -r pid; do all="$all $pid"; done; kill -TERM $all'  # it reads until this process ends


def launch(count: int, command: Sequence[str]) -> int:
    """Run a command in so many processes of this machine; return the exit status of the first that failed, or 0.

    Args:
        count: of the processes.
        command: words of a command, or the module of a stage, such as `pipeline.train`.

    Raises:
        UserError: the count is out of bounds, or the command cannot be started.
    """
    if not 1 <= count <= _MOST:
        raise UserError(f"-n must be at least 1 and at most {_MOST:,}, got {count}")
    words = [sys.executable, "-m", *command] if len(command) == 1 and command[0].startswith("pipeline.") else command
    address = f"127.0.0.1:{_free_port()}"
    started: list[subprocess.Popen[bytes]] = []
    try:
        with _passing_on(started) as all_started, _guarded() as guard:
            for index in range(count):
                told = {ADDRESS: address, COUNT: str(count), INDEX: str(index)}
                started.append(subprocess.Popen(words, env=os.environ | told, start_new_session=True))
                guard(started[-1].pid)
            all_started()
            return _status(_wait(started), command, started[0].returncode)
    except OSError as error:
        raise UserError(f"{words[0]}: {error.strerror}") from None
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Wait until all have ended, or the time is up after the first failure; return that one's index and status."""
    failed: tuple[int, int] | None = None
    latest = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < latest:
        if failed is None:
            failed = _first_failed(processes)
            latest = time.monotonic() + _GRACE_SECONDS if failed else latest
        time.sleep(_POLL_SECONDS)
    return failed or _first_failed(processes) or (0, 0)


def _first_failed(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """Return index and status of the process that failed; of several, one that was killed, and last one that aborted.

    So JAX ends a process that has lost process 0.
    """
    found = [(index, process.returncode) for index, process in enumerate(processes) if process.poll()]
    return min(found, key=lambda each: (each[1] == -signal.SIGABRT, each[1]), default=None)


def _status(failed: tuple[int, int], command: Sequence[str], of_first: int | None) -> int:
    """Return the exit status for the first process that failed, and tell of it where process 0 has not.

    Args:
        failed: its index and status.
        command: in the message.
        of_first: status of process 0, which tells where it fails by itself; None where it goes on.
    """
    index, status = failed
    if status and (of_first or 0) <= 0:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        others = "" if of_first == 0 else ", and the others after it"
        print(f"{command[-1]}: process {index} {how}{others}", file=sys.stderr)
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def _passing_on(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[Callable[[], object]]:
    """Pass Ctrl-C and SIGTERM on to all processes while the block runs, and the end of the terminal as SIGTERM.

    Yields what says that all have started: what comes before then is passed on then, to each of them once.
    """
    early: list[int] | None = []

    def pass_on(number: int, _: FrameType | None = None) -> None:
        if early is not None:
            early.append(number)
            return
        for process in processes:
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


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
