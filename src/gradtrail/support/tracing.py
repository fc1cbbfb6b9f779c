"""Records what a process computes with JAX's profiler, for TensorBoard and Perfetto."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from gradtrail.core.xla.compiler import Wrapper

RECORDED_SECONDS = 0.5  # XLA records every operation of every step, about 200,000 events a second


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[Wrapper]:
    """Yield a wrapper of functions whose calls are recorded, by name, from the second call of any of them on.

    The recording ends with the call during which `RECORDED_SECONDS` have passed, and with the block at the latest. The
    folder stays empty if no function is called twice.
    """
    calls = Counter[str]()
    has_begun, ends_at = False, math.inf

    def wrapper(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            nonlocal has_begun, ends_at
            calls[name] += 1
            if calls[name] == 2 and not has_begun:
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # calls of Python functions would hide the compiled ones
                trace.enter_context(jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options))
                has_begun, ends_at = True, time.perf_counter() + RECORDED_SECONDS
            with jax.profiler.TraceAnnotation(name):
                result = call(*args)
            if time.perf_counter() > ends_at:
                jax.block_until_ready(result)
                trace.close()
                ends_at = math.inf
            return result

        return recorded

    with contextlib.ExitStack() as trace:
        yield wrapper
