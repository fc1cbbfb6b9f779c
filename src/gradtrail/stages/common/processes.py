"""The processes that make one stage together, on one host or several: how they meet, agree, and learn of a loss.

Process 0 alone writes outs, tracks, and prints; the others compute. They are started by `gradtrail.launch`, or by a
scheduler that JAX knows, see `docs/several_hosts.md`. What depends on the clock, on signals or on the host is decided
by process 0 and asked for with `agreed`: through JAX's coordination service, not by a collective, for which gloo waits
for 30 s at most. Out of scope: what they compute together, and how (`core/common/sharding.py`).
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar, cast

import numpy as np

from gradtrail.core.common.validation import ConfigError
from gradtrail.stages.common.coordination import (
    forget_processes,
    jax_processes,
    load_jax,
    load_jaxlib,
    not_joined,
    told_of_errors,
)
from gradtrail.stages.common.environment import processor_digest, set_cpu_devices
from gradtrail.stages.common.lifeline import Lifeline, connect, is_loopback, listen
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.native_output import native_output
from gradtrail.support.paths import private_folder
from gradtrail.support.ranks import ADDRESS, COUNT, INDEX, index_told, is_follower, is_launched
from gradtrail.support.replaced import replaced

_HEARTBEAT_SECONDS = 60  # longer than gloo waits: its error can be told in a line, JAX's own ends the process
_GRACE_SECONDS = 3  # beyond `runtime.join_seconds`, in which the coordinator says who is missing
_LEAVE_SECONDS = 10
_SIGNALED = 128  # added to a signal, the exit status of who got it
_SLICE_MS = 2_000  # of waiting for process 0; between slices Python sees to signals
_SIGNS = ("Gloo", "NCCL", "coordination", "CoordinationService", "UNAVAILABLE", "heartbeat", "preempted")
T = TypeVar("T")


class Processes:
    """The processes of a stage as one of them sees them; see `ALONE` and `join`.

    Attributes:
        index: of this process, from 0.
        count: of all.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None):
        self.index, self.count = index, count
        self._client = client
        self._number = itertools.count()
        self._lifeline: Lifeline | None = None
        self._has_lost = False  # another process, of which process 0 tells

    def hold_on(self, coordinator: str, seconds: float) -> None:
        """Connect with the other processes within a time, to learn of the end of one; the address is JAX's."""
        host, key = coordinator.rpartition(":")[0].strip("[]"), "gradtrail/lifeline"
        if self.is_first:
            at = host if is_loopback(coordinator) else ""
            tell = functools.partial(self._client.key_value_set, key)
            try:
                self._lifeline = listen(at, self.count, seconds, tell)
            except TimeoutError:
                forget_processes()
                raise UserError(f"not all of {self.count} processes have connected within {seconds:g} s") from None
        else:
            try:
                self._lifeline = connect(host, self._wait_for(key), self.index)
            except (OSError, RuntimeError) as error:
                forget_processes()
                raise UserError(f"no connection to process 0 on {host}: {one_line(error)[:200]}") from None

    @contextlib.contextmanager
    def watched(self, stage: str) -> Iterator[None]:
        """End this process within seconds where another ends before the block does; process 0 tells of it.

        Within such a block, one around what may fail ends the watch with the fault, so that this process tells of it.
        """
        if self._lifeline is None:
            yield
            return
        stderr = os.dup(2)  # is not closed: `end` may be running as the block ends

        def end() -> None:
            os.dup2(stderr, 2)  # which `native_output` may have taken
            if self.is_first and (number := self.asked_to_stop()):
                os.kill(os.getpid(), number)  # the main thread ends the stage, as if it had got the signal
                time.sleep(_LEAVE_SECONDS)
            self.tell(f"{stage}: {self._describe_lost()}")
            self.exit(2)

        try:
            with self._lifeline.watched(end):
                yield
        except Exception:
            if self.is_first and (number := self.asked_to_stop()):
                os.kill(os.getpid(), number)  # what failed is a collective with the process that got it
            raise

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
            return list(load_jax().local_devices())
        self.all_ready()
        of_each: dict[int, list[Any]] = {}
        with native_output(), self._gloo_on_loopback():
            for device in sorted(load_jax().devices(), key=lambda device: device.id):
                of_each.setdefault(device.process_index, []).append(device)
            found = [device for index in sorted(of_each) for device in of_each[index][: shards // self.count]]
            importlib.import_module("gradtrail.core.common.sharding").connect(found)
        return found

    def agreed(self, decide: Callable[[], T]) -> T:
        """Return what `decide` returns in process 0, where alone it is called: a plain value, by JSON.

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

    def gather(self, rows: Mapping[str, np.ndarray], lengths: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the rows of all processes, see `Together.gather`."""
        if self.count == 1:
            return dict(rows)
        self.all_ready()
        found: dict[str, np.ndarray] = importlib.import_module("gradtrail.core.common.together").gather_rows(
            rows, lengths
        )
        return found

    def of_first(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function that gives what `function` returns in process 0, where alone it is called."""
        return lambda *args: self.agreed(functools.partial(function, *args))

    def require_same(self, values: Mapping[str, str]) -> None:
        """Raise UserError, in one line, where this process has another value than process 0 of something, by name.

        Packages and the kind of processor count too: both may change last digits, of which each process has its own.
        """
        here = dict(values) | {"the processor": processor_digest(), "jaxlib": version("jaxlib")}
        for name, value in self.agreed(lambda: here).items():
            if here[name] != value:
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

    def tell(self, line: str) -> None:
        """Print a line on stderr in process 0; in another, leave it for process 0, which tells it as it ends.

        One that has not joined prints it too, with its number.
        """
        of_whom = f"process {index_told()}: " if self.count == 1 and is_follower() else ""  # it has not joined
        print(f"{of_whom}{line}", file=sys.stderr, flush=True)  # of another process, once it has joined, to its log
        if self.is_first or self._has_lost:
            return
        with contextlib.suppress(RuntimeError):  # process 0 is gone: whoever started the processes tells of it
            self._client.key_value_set(f"gradtrail/fault/{self.index}", f"process {self.index}: {line}")

    def describe_loss(self, fault: Exception) -> str:
        """Return in one line which process was lost, where a fault of JAX says that one was; else nothing."""
        if self.count == 1 or not any(sign in str(fault) for sign in _SIGNS):
            return ""
        return self._describe_lost()

    def _describe_lost(self) -> str:
        self._has_lost = True
        if self.is_first and (told := self._client.key_value_dir_get("gradtrail/fault/")):
            return str(told[0][1])
        lost = self._lifeline.first_lost() if self._lifeline else ""
        return f"lost {lost or 'another process'}; `dvc repro` starts again, from the last checkpoint if there is one"

    def leave(self) -> None:
        """Wait for process 0, and end the work together: from here on each process is by itself, and none is lost."""
        if self.count == 1:
            return
        self.agreed(lambda: None)  # without limit, unlike the barrier
        if self._lifeline:
            self._lifeline.disarm()
        with contextlib.suppress(RuntimeError):  # a process that is lost now has done its part
            self._client.wait_at_barrier("gradtrail/leave", _LEAVE_SECONDS * 1000)
            load_jax().distributed.shutdown()
        if self._lifeline:
            self._lifeline.close()
        forget_processes()
        self.count = 1

    def exit(self, status: int) -> None:
        """End the process with a status without waiting for the others, where there are others and one may be lost."""
        if self.count > 1:
            if status > _SIGNALED:
                with contextlib.suppress(RuntimeError):  # process 0 is gone
                    self.ask_to_stop(status - _SIGNALED)
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

    def _gloo_on_loopback(self) -> contextlib.AbstractContextManager[object]:
        """Have gloo listen on loopback alone where the coordinator does; JAX itself takes the host's own address."""
        if not is_loopback(jax_processes().coordinator_address):
            return contextlib.nullcontext()
        jaxlib = load_jaxlib()
        on_loopback = functools.partial(jaxlib.make_gloo_tcp_collectives, hostname="127.0.0.1")
        return replaced(jaxlib, make_gloo_tcp_collectives=on_loopback)


ALONE = Processes()


def join(stage: str, seconds: float) -> Processes:
    """Meet the other processes of a stage, if whoever started this one started several; else return `ALONE`.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` say so, or `GRADTRAIL_LAUNCH`: then JAX finds
    what is missing of the three from its scheduler. All processes but the first are silent from here on: what they and
    their libraries print is kept in `.gradtrail/processes/`.

    Args:
        stage: its name.
        seconds: that a process waits for the others.

    Raises:
        UserError: not all have come; one line.
        SystemExit: likewise, in a process that leaves it to another to say so.
    """
    given = {name: os.environ[name] for name in (ADDRESS, COUNT, INDEX) if os.environ.get(name)}
    if not is_launched():
        return ALONE
    if any(not value.isdecimal() for name, value in given.items() if name != ADDRESS):
        raise UserError(f"{COUNT} and {INDEX} must be whole numbers, got {given.get(COUNT)!r} and {given.get(INDEX)!r}")
    address = given.get(ADDRESS)
    load_jax().config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from the stage
    with native_output() as said, told_of_errors(seconds):
        try:
            load_jax().distributed.initialize(
                address,
                *(int(given[name]) if name in given else None for name in (COUNT, INDEX)),
                coordinator_bind_address=address if address and is_loopback(address) else None,
                initialization_timeout=int(seconds) + _GRACE_SECONDS,
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise not_joined(error, said, seconds) from None
    state = jax_processes()
    joined = Processes(state.process_id, state.num_processes, state.client)
    joined.hold_on(state.coordinator_address, seconds)
    if not joined.is_first:
        folder = private_folder() / "processes"
        folder.mkdir(exist_ok=True)
        with (folder / f"{stage}-{joined.index}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    return joined
