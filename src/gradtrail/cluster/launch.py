"""Starts the processes of a training on this machine: `python -m gradtrail.cluster.launch -n 2 pipeline.train`.

The processes get an address on loopback by which they connect; see `stages/common/processes.py`. Ctrl-C and SIGTERM are
forwarded to all. If one fails, the others are killed, and if process 0 has not printed the reason, the launcher prints
it in one line: for a killed process, for one whose error is in its log, and for one that stopped responding, for which
JAX aborts the others. If the launcher is killed (on Linux) or its terminal closed, the processes get SIGTERM. On
several machines a scheduler starts one launcher per machine.
"""

import ctypes
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import click

from gradtrail.support.errors import UserError
from gradtrail.support.paths import same_command
from gradtrail.support.ranks import ADDRESS, COUNT, INDEX, log_path, process_index
from gradtrail.support.signals import handling

_GRACE_SECONDS = 10.0  # time for process 0 to close its run after the first failure or signal
_ABORT_SECONDS = 1.0  # time for the others to end, or for JAX to abort them, after a death or an error of process 0
_POLL_SECONDS = 0.05
_MOST = 1024
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_JAX_ABORTED = "JAX distributed service detected fatal errors"
_NOT_JOINED = "CoordinationService/RegisterTask"
_UNRESPONSIVE = re.compile(r"stopped sending heartbeats\):\s*((?:\d+\s+)+)")


def launch(count: int | None, command: Sequence[str]) -> int:
    """Run a command, or a stage such as `pipeline.train`, in several processes on this machine; return the exit status.

    The status is 0, that of a process that failed or was told to stop, or 2 if one was killed or stopped responding. A
    count of None starts one process, as one of those that a scheduler starts on several machines.
    """
    if count is not None and not 1 <= count <= _MOST:
        raise UserError(f"-n must be at least 1 and at most {_MOST:,}, got {count}")
    stage = re.sub(r"^pipeline[./]|\.py$", "", command[-1])
    words = [sys.executable, "-P", f"pipeline/{stage}.py"] if [*command] == [f"pipeline.{stage}"] else command
    environments = {process_index(): {}} if count is None else _environments(count)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # no core dumps of aborts by JAX

    processes: dict[str, subprocess.Popen[bytes]] = {}

    def forward(number: int, _: FrameType | None) -> None:
        for process in processes.values():
            process.send_signal(number)

    try:
        with handling(forward, *_FORWARDED):
            for index, environment in environments.items():
                log_path(index).unlink(missing_ok=True)
                processes[index] = subprocess.Popen(
                    words,
                    env=os.environ | environment,
                    start_new_session=True,
                    preexec_fn=_end_with_launcher,  # noqa: PLW1509 # this process has one thread
                )
            failed = _wait(processes)
        if failed is None:
            return 0
        status = processes[failed].returncode
        if failed != "0" or status < 0:  # otherwise process 0 has printed the reason
            print(f"{stage}: {_describe(failed, processes, f'{stage}: ')}", file=sys.stderr)
        return status if status > 0 else 128 - status if -status in _FORWARDED else 2
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def _environments(count: int) -> dict[str, dict[str, str]]:
    """Return the variables by which JAX connects the processes, by the index of the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return {str(index): {ADDRESS: address, COUNT: str(count), INDEX: str(index)} for index in range(count)}


def _wait(processes: Mapping[str, subprocess.Popen[bytes]]) -> str | None:
    """Wait until all have ended, or the time after the first failure is over; return the index of the failed process.

    That is process 0 if it ended with an error, which it has printed itself.
    """
    first, latest = next(iter(processes.values())), float("inf")
    while any(process.poll() is None for process in processes.values()) and time.monotonic() < latest:
        if failed := _first_failed(processes):
            status = processes[failed].returncode
            is_described = status > 0 and failed == "0"
            is_slow = status > 0 or _NOT_JOINED in _log(failed)
            seconds = _GRACE_SECONDS if is_slow and not is_described else _ABORT_SECONDS
            latest = min(latest, time.monotonic() + seconds)
        elif first.poll() == 0:  # the outputs are written
            latest = min(latest, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return _first_failed(processes)


def _first_failed(processes: Mapping[str, subprocess.Popen[bytes]]) -> str | None:
    """Return the index of the first failed process, preferably one that JAX did not abort because of another."""
    failed = [index for index, process in processes.items() if process.poll()]
    return min(failed, key=lambda index: processes[index].returncode == -signal.SIGABRT, default=None)


def _describe(failed: str, processes: Mapping[str, subprocess.Popen[bytes]], prefix: str) -> str:
    """Return the reason why a process failed, or why the one failed for which JAX aborted it."""
    status, log = processes[failed].returncode, _log(failed).strip()
    restart = f"{same_command()} resumes from the last checkpoint, if there is one"
    if status == -signal.SIGABRT and _JAX_ABORTED in log:
        if _NOT_JOINED in log:
            missing = ", ".join(index for index, process in processes.items() if process.returncode is None)
            names = f"process {missing}" if missing else "another process"
            return f"{names} did not connect within `runtime.join_seconds`"
        match = _UNRESPONSIVE.search(log)
        return f"process {', '.join(match[1].split()) if match else '0'} stopped responding; {restart}"
    if status < 0:
        return f"process {failed} was killed by {signal.Signals(-status).name}; {restart}"
    if not log:
        return f"process {failed} ended with status {status}"
    return f"process {failed}: {log.splitlines()[-1].removeprefix(prefix)}"


def _log(index: str) -> str:
    path = log_path(index)
    return path.read_text(errors="replace") if path.exists() else ""


def _end_with_launcher() -> None:
    """Let a new process get SIGTERM when the launcher ends, even if it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "count", type=int, help="Number of processes.  [default: one of those that a scheduler starts]")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(count: int | None, command: tuple[str, ...]) -> None:
    """Run COMMAND in several processes of this machine, such as `-n 2 pipeline.train`."""
    try:
        sys.exit(launch(count, command))
    except UserError as error:
        print(f"launch: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
