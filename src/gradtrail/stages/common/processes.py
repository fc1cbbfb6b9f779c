"""The processes that train together, on one host or several: a thin layer over `jax.distributed`.

Process 0 alone writes outputs, tracks, and prints; the others compute. They are started by `gradtrail.cluster.launch`,
or by a scheduler that JAX knows, see `docs/cluster.md`. What depends on the clock, on signals or on the host is decided
by process 0; the others receive the decision from JAX's coordination service, since a collective of gloo fails after
30 s. Out of scope: what they compute together, and how (`core/sharding.py`).
"""

import contextlib
import functools
import importlib
import itertools
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, TypeVar, cast

from gradtrail.core.config import ConfigError
from gradtrail.stages.common.environment import set_cpu_devices
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.ranks import ADDRESS, COUNT, INDEX, is_follower, is_launched, log_path

HEARTBEAT_SECONDS = 10  # silence after which JAX considers a process dead and aborts the others
_DAY_MS = 86_400_000  # longest wait for another process that is alive
_LOOPBACK = ("127.", "localhost:", "[::1]:")
_numbers = itertools.count()  # all processes make the same decisions in the same order
T = TypeVar("T")


def join(seconds: float) -> None:
    """Connect to the other processes of a training, if the environment says that there are any.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` describe them; with `GRADTRAIL_LAUNCH` JAX finds
    those that are missing from its scheduler. JAX aborts the process if not all connect within `seconds`.

    Raises:
        UserError: the variables do not describe the processes; one line.
    """
    if not is_launched():
        return
    jax, address = importlib.import_module("jax"), os.environ.get(ADDRESS)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from the stage
    try:
        jax.distributed.initialize(
            address,
            *(int(os.environ[name]) if os.environ.get(name) else None for name in (COUNT, INDEX)),
            coordinator_bind_address=address if address and address.startswith(_LOOPBACK) else None,
            initialization_timeout=max(1, int(seconds)),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        names = f"{ADDRESS}, {COUNT} and {INDEX}"
        raise UserError(f"{names}, or a scheduler, do not describe the processes: {one_line(error)[:200]}") from None


def devices(shards: int) -> list[Any]:
    """Return the devices for a number of shards, equally many of each process, before JAX has looked for any.

    Raises:
        ConfigError: the processes cannot have equally many shards; one line.
    """
    jax, state = importlib.import_module("jax"), _state()
    if shards % state.num_processes:
        count = state.num_processes
        raise ConfigError(f"train.shards must be a multiple of the number of processes, {count}, got {shards}")
    per_process = shards // state.num_processes
    set_cpu_devices(per_process)
    if state.client is None:
        return list(jax.local_devices())
    if state.coordinator_address.startswith(_LOOPBACK):  # gloo listens on the host's address; JAX has no option for it
        library: Any = importlib.import_module("jaxlib._jax")
        library.make_gloo_tcp_collectives = functools.partial(library.make_gloo_tcp_collectives, hostname="127.0.0.1")
    by_process = [jax.local_devices(process_index=index) for index in range(state.num_processes)]
    return [device for local in by_process for device in local[:per_process]]


def agreed(decide: Callable[[], T]) -> T:
    """Return the result of `decide` in process 0, which alone calls it: a value that JSON can represent.

    Each process must ask for the same decisions in the same order.
    """
    client = _client()
    if client is None:
        return decide()
    key = f"gradtrail/{next(_numbers)}"
    if is_follower():
        return cast(T, json.loads(client.blocking_key_value_get(key, _DAY_MS)))
    value = decide()
    client.key_value_set(key, json.dumps(value))
    return value


def wait_for_all() -> None:
    """Wait until every process has called this: the first step is a collective, which compiling must not delay."""
    if (client := _client()) is not None:
        client.wait_at_barrier(f"gradtrail/{next(_numbers)}", _DAY_MS)


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """Run the block in process 0 before it runs in the others."""
    if is_follower():
        agreed(lambda: None)
    yield
    if not is_follower():
        agreed(lambda: None)


def require_same(values: Mapping[str, str]) -> None:
    """Raise UserError, in one line, if this process has another value than process 0 of something, by name.

    Packages count too: they may change last digits, of which each process has its own.
    """
    own_values = dict(values) | {"jaxlib": version("jaxlib")}
    for name, value in agreed(lambda: own_values).items():
        if own_values[name] != value:
            raise UserError(f"{name} differs from that of process 0, on {socket.gethostname()}")


def leave() -> None:
    """Disconnect, once process 0 has called this: from here on a process may end without ending the others."""
    if is_connected():
        agreed(lambda: None)
        importlib.import_module("jax").distributed.shutdown()


def is_connected() -> bool:
    """Whether this is one of several processes, between `join` and `leave`."""
    return _client() is not None


def describe_fault(fault: Exception) -> str:
    """Return an error of one of several processes in one line; its traceback goes to the process's log.

    If it is one of JAX, another process may have ended: JAX's heartbeat or the launcher ends this one meanwhile.
    """
    traceback.print_exception(fault, file=sys.__stderr__)
    if any(word in repr(fault) for word in ("JaxRuntimeError", "Gloo")):
        time.sleep(2 * HEARTBEAT_SECONDS)
    return f"{type(fault).__name__}: {one_line(fault)[:200]}; its traceback is in {log_path()}"


def exit_with(status: int) -> None:
    """End the process, without waiting for others that it is connected with, as JAX would."""
    if is_connected():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def write_log() -> None:
    """Redirect stderr of one of several processes to its log; for process 0 only the output of native libraries."""
    if not is_launched():
        return
    streams = [os.fdopen(os.dup(old.fileno()), "w", 1, old.encoding, old.errors) for old in (sys.stdout, sys.stderr)]
    with log_path().open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    if not is_follower():
        sys.stdout, sys.stderr = streams


def _state() -> Any:
    """Return JAX's record of the processes, which has no public name; imported late, for stages without JAX."""
    return importlib.import_module("jax._src.distributed").global_state


def _client() -> Any:
    """Return the client of JAX's coordination service; None in a single process."""
    return _state().client if is_launched() else None
