"""The processes that train together, on one host or several: a thin layer over `jax.distributed`.

Process 0 alone writes outputs, tracks, and prints; the others compute. They are started by `gradtrail.launch`, or by a
scheduler that JAX knows, see `docs/several_hosts.md`. What depends on the clock, on signals or on the host is decided
by process 0, and the others get it with `agreed`: from JAX's coordination service, as gloo's collectives wait for 30 s
at most. A process that stops answering ends the others by JAX's heartbeat: it aborts them, and `gradtrail.launch` says
in one line which one it was. Out of scope: what they compute together, and how (`core/sharding.py`).
"""

import contextlib
import functools
import importlib
import ipaddress
import itertools
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, TypeVar, cast

from gradtrail.core.config import ConfigError
from gradtrail.stages.common.environment import processor_digest, set_cpu_devices
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.ranks import ADDRESS, COUNT, INDEX, LAUNCH, is_follower, is_launched, log_path
from gradtrail.support.replaced import replaced

_HEARTBEAT_SECONDS = 10
_SLICE_MS = 2_000  # of waiting for process 0; between slices Python handles signals
_SIGNS = ("Gloo", "NCCL", "UNAVAILABLE", "coordination")  # of the end of another process, in a fault
T = TypeVar("T")


class Processes:
    """The processes of a training as one of them sees them; see `ALONE` and `join`.

    Attributes:
        index: number of this process, from 0.
        count: number of processes.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None):
        self.index, self.count = index, count
        self._client = client
        self._number = itertools.count()

    @property
    def is_first(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    def devices(self, shards: int) -> list[Any]:
        """Return the devices for so many shards, as many of each process; JAX must not have looked for any yet.

        Raises:
            ConfigError: the processes cannot have equally many shards; one line.
        """
        if shards % self.count:
            raise ConfigError(f"train.shards must be a multiple of the number of processes, {self.count}, got {shards}")
        set_cpu_devices(shards // self.count)
        if self.count == 1:
            return list(_jax().local_devices())
        devices: dict[int, list[Any]] = {}
        with _gloo_on_loopback():
            for device in sorted(_jax().devices(), key=lambda device: device.id):
                devices.setdefault(device.process_index, []).append(device)
        return [device for index in sorted(devices) for device in devices[index][: shards // self.count]]

    def agreed(self, decide: Callable[[], T]) -> T:
        """Return the result of `decide`, which process 0 alone calls: a plain value, as JSON.

        All processes must ask for the same decisions in the same order; the others wait for process 0 without limit.
        """
        if self.count == 1:
            return decide()
        key = f"gradtrail/agreed/{next(self._number)}"
        if self.is_first:
            value = decide()
            self._client.key_value_set(key, json.dumps(value))
            return value
        return cast(T, json.loads(self._wait_for(key)))

    def all_ready(self) -> None:
        """Wait until all processes have called this, without limit, as a collective would not."""
        if self.count == 1:
            return
        key = f"gradtrail/ready/{next(self._number)}"
        if not self.is_first:
            self._client.key_value_set(f"{key}/{self.index}", "")
        self.agreed(lambda: [self._wait_for(f"{key}/{index}") for index in range(1, self.count)])

    def in_first_process(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function with the result of `function` in process 0, which alone calls it."""
        return lambda *args: self.agreed(functools.partial(function, *args))

    def require_same(self, values: Mapping[str, str]) -> None:
        """Raise UserError, in one line, if this process has another value than process 0 of something, by name.

        Packages and the kind of processor count too: both may change last digits, of which each process has its own.
        """
        own_values = dict(values) | {"the processor": processor_digest(), "jaxlib": version("jaxlib")}
        for name, value in self.agreed(lambda: own_values).items():
            if own_values[name] != value:
                raise UserError(f"{name} differs from that of process 0, on {socket.gethostname()}")

    def ask_to_stop(self, number: int) -> None:
        """Let process 0 know that this process got a signal to stop."""
        if not self.is_first:
            self._client.key_value_set(f"gradtrail/stop/{self.index}", str(number), allow_overwrite=True)

    def asked_to_stop(self) -> int | None:
        """Return the signal that another process got, in process 0; None for none."""
        if self.count == 1:
            return None
        return next((int(number) for _, number in self._client.key_value_dir_get("gradtrail/stop/")), None)

    def describe(self, fault: Exception) -> str:
        """Return a fault in one line; its traceback goes to the log.

        A collective that fails because another process has ended gives that one's launcher, or the heartbeat, time to
        say which: they end this process meanwhile.
        """
        traceback.print_exception(fault, file=sys.__stderr__)  # which is the log in process 0 too
        if any(sign in str(fault) for sign in _SIGNS):
            time.sleep(2 * _HEARTBEAT_SECONDS)
        return f"{type(fault).__name__}: {one_line(fault)[:200]}; its traceback is in {log_path()}"

    def leave(self) -> None:
        """Wait for process 0, and end the work together: from here on each process is by itself, and none is lost."""
        if self.count == 1:
            return
        self.agreed(lambda: None)  # without limit, unlike JAX's barrier
        _jax().distributed.shutdown()
        self.count = 1

    def exit(self, status: int) -> None:
        """End the process with a status, without waiting for other processes."""
        if self.count > 1:  # JAX would wait for them
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        sys.exit(status)

    def _wait_for(self, key: str) -> str:
        while True:
            try:
                return str(self._client.blocking_key_value_get(key, _SLICE_MS))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


ALONE = Processes()


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


def join(seconds: float) -> Processes:
    """Meet the other processes of a training, if whoever started this one started several; else return `ALONE`.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` say so, or `GRADTRAIL_LAUNCH`: then JAX finds
    what is missing of the three from its scheduler. Where not all come within `seconds`, JAX aborts those that have.

    Raises:
        UserError: the variables do not say how many processes there are; one line.
    """
    if not is_launched():
        return ALONE
    values = {name: os.environ[name] for name in (ADDRESS, COUNT, INDEX) if os.environ.get(name)}
    if any(not value.isdecimal() for name, value in values.items() if name != ADDRESS):
        got = f"{values.get(COUNT)!r} and {values.get(INDEX)!r}"
        raise UserError(f"{COUNT} and {INDEX} must be whole numbers, got {got}")
    address = values.get(ADDRESS)
    _jax().config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from the stage
    try:
        _jax().distributed.initialize(
            address,
            *(int(values[name]) if name in values else None for name in (COUNT, INDEX)),
            coordinator_bind_address=address if address and is_loopback(address) else None,
            initialization_timeout=max(1, int(seconds)),
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        if "should be defined" in str(error) or "must be defined" in str(error):
            names = f"{ADDRESS}, {COUNT} and {INDEX}"
            line = f"JAX detected no scheduler that started this process; {LAUNCH} needs one, or {names}"
            raise UserError(line) from None
        raise UserError(f"the processes could not connect: {one_line(error)[:200]}") from None
    state = _jax_processes()
    return Processes(state.process_id, state.num_processes, state.client)


def is_loopback(address: str) -> bool:
    """Whether an address with a port is one of this host alone."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _gloo_on_loopback() -> contextlib.AbstractContextManager[object]:
    """Let gloo listen on loopback alone if the coordinator does; by default JAX uses the host's address."""
    if not is_loopback(_jax_processes().coordinator_address):
        return contextlib.nullcontext()
    jaxlib = importlib.import_module("jaxlib._jax")
    on_loopback = functools.partial(jaxlib.make_gloo_tcp_collectives, hostname="127.0.0.1")
    return replaced(jaxlib, make_gloo_tcp_collectives=on_loopback)


def _jax() -> Any:
    """Return JAX, late: stages that do not compute import this module too, and do not depend on JAX."""
    return importlib.import_module("jax")


def _jax_processes() -> Any:
    """Return JAX's own record of its processes, which has no public name."""
    return importlib.import_module("jax._src.distributed").global_state
