"""Records what JAX compiles while a block runs: how often, for how long, and which compilations were unplanned.

Counts, durations and names are those of the events of `jax.monitoring`. JAX sends them from the thread that compiles,
below the call that causes it, so the Python stack has the line of the project.
"""

import contextlib
import re
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.monitoring

_REQUEST, _HIT = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"
_DURATIONS = "/jax/core/compile/"  # tracing, lowering and compiling
_COMPILED = "/jax/core/compile/backend_compile_duration"  # one per program, on a cache hit too
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parent)
_MOST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A compilation that a call caused."""

    function: str  # name of the function in Python
    line: str  # line of the project that called it, such as `src/gradtrail/core/train/loop.py:264`


class CompileLog:
    """Log of what JAX compiles, in all threads, while this context manager is open."""

    def __init__(self) -> None:
        # Compilations that calls caused, programs from the persistent cache included: all except those under
        # `planned`. Empty if `jax_disable_jit` or `jax_debug_nans` is on: then nothing is compiled ahead of time.
        self.unplanned: list[Compilation] = []
        self.compilations = 0  # programs that were compiled or read from the persistent cache
        self.seconds = 0.0  # time spent on tracing, lowering, compiling and reading the cache
        self.requests = self.hits = 0  # look-ups in the persistent cache, and programs that it had
        self._lock = threading.Lock()  # threads may compile concurrently
        self._thread = threading.local()  # `is_planned` of each thread

    def __enter__(self) -> "CompileLog":
        config: Any = jax.config  # mypy does not know its switches
        self._is_debugging = config.jax_disable_jit or config.jax_debug_nans
        jax.monitoring.register_event_listener(self._count)
        jax.monitoring.register_event_duration_secs_listener(self._time)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._time)
        jax.monitoring.unregister_event_listener(self._count)

    @contextlib.contextmanager
    def planned(self) -> Iterator[None]:
        """Count what this thread compiles in the block as planned."""
        before = self._is_planned
        self._thread.is_planned = True
        try:
            yield
        finally:
            self._thread.is_planned = before

    @property
    def warnings(self) -> list[str]:
        """A line for each function and place of an unplanned compilation, 20 at most and one for the rest."""
        lines = [
            f"{compilation.function} was compiled {'once' if count == 1 else f'{count} times'} by a call at "
            f"{compilation.line}"
            for compilation, count in Counter(self.unplanned).items()
        ]
        left_out = lines[_MOST_LINES:]
        return lines[:_MOST_LINES] + [f"{len(left_out)} more functions were compiled by calls"] * bool(left_out)

    @property
    def _is_planned(self) -> bool:
        return getattr(self._thread, "is_planned", False)

    def _count(self, event: str, **_: Any) -> None:
        with self._lock:
            self.requests += event == _REQUEST
            self.hits += event == _HIT

    def _time(self, event: str, duration_secs: float, **details: Any) -> None:
        if not event.startswith(_DURATIONS):
            return
        with self._lock:
            self.seconds += duration_secs
            self.compilations += event == _COMPILED
        if event == _COMPILED and not (self._is_planned or self._is_debugging):
            name = re.sub(r"^\w+\((.*)\)$", r"\1", str(details.get("fun_name", "unknown function")))  # f of `jit(f)`
            self.unplanned.append(Compilation(function=name, line=_project_line()))


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Yield a list that gets an entry for each program that this thread reads from the persistent compilation cache."""
    hits, thread = [], threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        if event == _HIT and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def _project_line() -> str:
    """Return the innermost line on this thread's stack that is neither in a library nor in this package."""
    for frame, number in traceback.walk_stack(sys._getframe()):  # with None it skips callers
        path = Path(frame.f_code.co_filename)
        is_generated = "<" in str(path)
        if is_generated or "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in _LIBRARIES):
            continue
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{number}"
    return "an unknown line"
