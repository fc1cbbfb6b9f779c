"""JAX's own record of its processes, and how it fails where they do not meet, in a line in place of an abort.

Its record has no public name. JAX is imported late: stages that do not compute import this module too.
"""

import contextlib
import functools
import importlib
import re
from typing import IO, Any

from gradtrail.support.errors import UserError, one_line
from gradtrail.support.ranks import ADDRESS, COUNT, INDEX, LAUNCH
from gradtrail.support.replaced import replaced

_MISSING = re.compile(r"timed out task names:\s*((?:\d+\s+)*\d+)")


def not_joined(error: Exception, said: IO[str], seconds: float) -> UserError | SystemExit:
    """Return how to end where not all processes came; see `join`."""
    state, text = jax_processes(), str(error)
    client = forget_processes()
    if client is None:  # nothing was tried
        if "should be defined" in text or "must be defined" in text:
            names = f"{ADDRESS}, {COUNT} and {INDEX}"
            return UserError(f"JAX detected no scheduler that started this process; {LAUNCH} needs one, or {names}")
        return UserError(f"the processes could not meet: {one_line(text)[:200]}")
    try:
        client.shutdown()
    except RuntimeError as why:
        text = f"{text} {why}"
    said.seek(0)
    text += said.read()
    at, count, index = state.coordinator_address, state.num_processes, state.process_id
    if missing := _MISSING.search(text):
        if index:
            return SystemExit(2)  # process 0 says it
        numbers = ", ".join(missing[1].split())
        return UserError(
            f"of {count} processes these have not connected to {at} within {seconds:g} s: {numbers}; "
            "`runtime.join_seconds` says how long to wait"
        )
    if index > 1:
        return SystemExit(2)  # process 1 says it
    return UserError(f"process {index} of {count} got no answer from process 0 at {at} within {seconds:g} s")


def told_of_errors(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Have JAX raise where processes do not meet within a time, and name them; by itself it aborts the process."""
    jaxlib = load_jaxlib()
    client, service = jaxlib.get_distributed_runtime_client, jaxlib.get_distributed_runtime_service
    options = {"missed_heartbeat_callback": lambda _: None, "shutdown_on_destruction": False}
    return replaced(
        jaxlib,
        get_distributed_runtime_client=functools.partial(client, **options),
        get_distributed_runtime_service=functools.partial(service, cluster_register_timeout=max(1, int(seconds))),
    )


def load_jax() -> Any:
    """Return JAX, late: stages that do not compute import this module too, and do not depend on JAX."""
    return importlib.import_module("jax")


def load_jaxlib() -> Any:
    """Return the part of jaxlib that has clients and servers of the coordination."""
    return importlib.import_module("jaxlib._jax")


def forget_processes() -> Any:
    """Have JAX not wait for the others as Python ends; return its client."""
    client, jax_processes().client, jax_processes().service = jax_processes().client, None, None
    return client


def jax_processes() -> Any:
    """Return JAX' own record of its processes; it has no public name, and libraries such as Orbax use it too."""
    return importlib.import_module("jax._src.distributed").global_state
