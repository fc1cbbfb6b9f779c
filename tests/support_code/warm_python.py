"""A Python that starts at once: a server has imported the libraries, and forks a process for each command.

Most of what a test of the pipeline costs is importing MLflow, DVC and JAX, anew for every command. Here `bin/python` in
a folder hands its arguments, working folder, environment and streams to the server, waits for the process and ends with
its exit status. Nothing of `gradtrail` is imported before the fork: each command runs the code of its own folder.
Signals reach the process and what it started; it ends where `bin/python` is killed, and the server where the test run
ends.

Out of scope: `umask` and `ulimit`, which the server's processes do not share with who asks. What is about those, or
about how Python starts, runs the real one; so does what is neither `-m module`, `-c code` nor `-P script`.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
from filelock import FileLock

_LIBRARIES = (
    "alembic.command",
    "dvc.cli.parser",
    "dvc.data_cloud",
    "dvc.repo.experiments.queue.workspace",
    "dvc.repo.index",
    "dvc.repo.open_repo",
    "dvc.repo.plots",
    "dvc.repo.reproduce",
    "dvc.utils.hydra",
    "flax.nnx",
    "jax",
    "jaxlib.mlir.dialects.mhlo",
    "jaxtyping",
    "jinja2",
    "markdown_it",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "mlflow",
    "mlflow.pyfunc",
    "mlflow.store.model_registry.sqlalchemy_workspace_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "mlflow.system_metrics.system_metrics_monitor",
    "mlflow.tracing.processor.otel",
    "mlflow.utils.search_logged_model_utils",
    "networkx",
    "optax",
    "orbax.checkpoint",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pydantic",
    "rich.progress",
    "ruamel.yaml",
    "safetensors.numpy",
    "scipy.stats",
    "scmrepo.git",
    "sklearn.datasets",
    "sklearn.metrics",
    "sqlalchemy.dialects.sqlite",
)
_SECONDS = 300  # that the server may take to start, on a machine that does much else

# Runs without `site`, as that is most of what a Python takes to start.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
if sys.argv[1:2] not in (["-c"], ["-m"], ["-P"]):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
server = socket.socket(socket.AF_UNIX)
server.connect("socket")
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: server.sendall(bytes([number])))
answer = server.recv(4)
status = int.from_bytes(answer, "big", signed=True) if answer else 255
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
_PLAIN = """#!/bin/sh
exec {python!r} "$@"
"""


@functools.cache
def shared_folder() -> Path:
    """Return a folder that the processes of one test run share; it goes when the run has ended."""
    owner = psutil.Process(_owner())
    folder = Path(tempfile.gettempdir()) / f"gradtrail-{owner.pid}-{owner.create_time()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@functools.cache
def made_once(make: Callable[[Path], object], name: str) -> Path:
    """Return what lies in the shared folder under a name, made by the first that asks for it; a fault is everyone's."""
    path, made = shared_folder() / name, shared_folder() / f"{name}.made"
    with FileLock(shared_folder() / f"{name}.lock"):
        if not made.exists():
            try:
                make(path)
                made.touch()
            except Exception:
                made.write_text(traceback.format_exc())
    assert not (fault := made.read_text()), fault
    return path


def warm_python() -> Path:
    """Return a `bin/python` that starts at once, in a folder that is an environment to `pipeline/stage.sh`."""
    return made_once(_start_server, "warm") / "bin" / "python"


def _owner() -> int:
    """Return the process that the test run ends with."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def _start_server(folder: Path) -> None:
    """Start a server; return when it accepts commands."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Only Linux has `pidfd_open`, and not in every Python; without it each command starts a Python of its own
    is_able = hasattr(os, "pidfd_open")
    python.write_text((_CLIENT if is_able else _PLAIN).format(python=sys.executable))
    python.chmod(0o755)
    if not is_able:
        return
    without = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "MLFLOW_TRACKING_URI")
    kept = {name: value for name, value in os.environ.items() if name not in without}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), str(_owner())]
    with (folder / "log").open("wb") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        done = subprocess.run(
            command, cwd=folder, env=kept, check=False, timeout=_SECONDS, start_new_session=True, **streams
        )
    assert done.returncode == 0, (folder / "log").read_text()


def _serve(owner: int) -> tuple[list[str], str, dict[str, str]] | None:
    """Fork for each command until the owner is gone; return the request in the process that is to run it."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        listening.listen(64)
        if os.fork() > 0:
            os._exit(0)  # which says that commands may come
        owned = os.pidfd_open(owner)
        while [fd for fd, _ in _wait_for(listening.fileno(), owned)] == [listening.fileno()]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                return _watch(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    return None


def _watch(connection: socket.socket) -> tuple[list[str], str, dict[str, str]] | None:
    """Fork once more: one process runs the command, this one hands signals to it and tells how it ended."""
    data, streams, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as reading:
        request = json.loads(reading.read(int.from_bytes(data, "big")))
    if (runner := os.fork()) == 0:
        os.setpgid(0, 0)
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return request
    with contextlib.suppress(OSError):
        os.setpgid(runner, runner)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(runner)
    while ended not in [fd for fd, _ in _wait_for(ended, connection.fileno())]:
        number = connection.recv(1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(runner, number[0] if number else signal.SIGKILL)
        if not number:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(4, "big", signed=True))
    os._exit(0)


def _wait_for(*descriptors: int) -> list[tuple[int, int]]:
    polling = select.poll()
    for descriptor in descriptors:
        polling.register(descriptor, select.POLLIN)
    return polling.poll()


def _run(arguments: list[str], folder: str, env: dict[str, str]) -> None:
    """Do what Python does with `-m module` or `-c code`, after `-P` without the folder on the path, or `-P script`."""
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own = str(Path(__file__).resolve().parent)
    added = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
    sys.executable = str(Path.cwd() / "bin" / "python")  # so that what it starts starts at once too
    os.chdir(folder)
    kind, what, *rest = arguments
    first = [] if kind == "-P" else [folder]
    sys.path[:] = [*first, *added, *(path for path in sys.path if path != own)]
    if what in ("-c", "-m"):
        kind, what, *rest = arguments[1:]
    if kind == "-P":
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")
    elif kind == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        main: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(what, "<string>", "exec"), main)  # noqa: S102 - as `python -c` does


def _end(arguments: list[str], folder: str, env: dict[str, str]) -> NoReturn:
    """Run a command and end as Python does, but for taking every imported module apart, which takes seconds."""
    status = 0
    try:
        _run(arguments, folder, env)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for _name in _LIBRARIES:
        importlib.import_module(_name)
    logging.getLogger().handlers.clear()  # which one of them sets up; DVC alone does without
    gc.collect()
    gc.freeze()  # so that no process looks at all of this again
    gc.set_threshold(50_000, 20, 50)  # as in the tests
    if found := _serve(int(sys.argv[1])):
        _end(*found)
    shutil.rmtree(Path.cwd().parent)
