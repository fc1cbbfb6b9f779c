"""Records what JAX compiles while a block runs: how often, for how long, and why a call was not served by a program.

Counts and durations are those of the events of `jax.monitoring`. JAX sends them from the thread that compiles, below
the call that causes it, so the Python stack has the line of the project, and in a frame of JAX the arguments.
"""

import contextlib
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.monitoring

from gradtrail.core.xla.signature import Signatures

_REQUEST, _HIT = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"
_DURATIONS = "/jax/core/compile/"  # tracing, lowering and compiling
_COMPILED = "/jax/core/compile/backend_compile_duration"  # one per program, on a cache hit too
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parent)


@dataclass(frozen=True)
class Compilation:
    """A compilation that a call caused."""

    function: str  # name of the function in Python, or of its program
    line: str  # line of the project that caused it, such as `src/gradtrail/core/train/loop.py:264`
    reason: str  # how it differs from the nearest program of the function before; empty if it is the first

    def __str__(self) -> str:
        again, reason = (" again", f": {self.reason}") if self.reason else ("", "")
        return f"{self.function} was compiled{again} by a call at {self.line}{reason}"


class CompileLog:
    """Log of what JAX compiles, in all threads, while this context manager is open."""

    def __init__(self, report: Callable[[Compilation], object] = lambda _: None) -> None:
        self.report = report  # called after each compilation that a call caused, in its thread
        # Compilations that calls caused, also from the persistent cache: all but those under `planned` or `disable_jit`
        self.unplanned: Counter[Compilation] = Counter()
        self.compilations = 0  # programs that were compiled or read from the persistent cache
        self.seconds = 0.0  # time spent on tracing, lowering, compiling and reading the cache
        self.requests = self.hits = 0  # look-ups in the persistent cache, and programs that it had
        self.signatures = Signatures()  # of programs by calls, and of those ahead of time
        self._lock = threading.RLock()  # threads may compile concurrently
        self._thread = threading.local()  # `is_planned` of each thread

    def __enter__(self) -> "CompileLog":
        config: Any = jax.config  # mypy does not know its switches
        self._is_debugging = config.jax_disable_jit
        jax.monitoring.register_event_listener(self._count)
        jax.monitoring.register_event_duration_secs_listener(self._time)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._time)
        jax.monitoring.unregister_event_listener(self._count)

    @contextlib.contextmanager
    def planned(self) -> Iterator[None]:
        """Count what this thread compiles in the block as planned."""
        before = getattr(self._thread, "is_planned", False)
        self._thread.is_planned = True
        try:
            yield
        finally:
            self._thread.is_planned = before

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
        if event == _COMPILED and not (getattr(self._thread, "is_planned", False) or self._is_debugging):
            name, reason = details.get("fun_name", "a function"), ""
            with self._lock:
                if call := _jitted_call():
                    info = call["jit_info"]
                    static = {*getattr(info, "static_argnames", ()), *getattr(info, "static_argnums", ())}
                    name, reason = self.signatures.add(call["fun"], call["args"], call["kwargs"], static)
                compilation = Compilation(name, project_line(), reason)
                self.unplanned[compilation] += 1
            self.report(compilation)


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


def _jitted_call() -> dict[str, Any] | None:
    """Return function and arguments of the call that compiles, from a frame of JAX, which has no public way to them."""
    stack = traceback.walk_stack(sys._getframe())
    found = (dict(frame.f_locals) for frame, _ in stack if frame.f_code.co_name == "cache_miss")
    return next((values for values in found if {"fun", "jit_info", "args", "kwargs"} <= values.keys()), None)


def project_line(fault: TracebackType | None = None) -> str:
    """Return the innermost line of a traceback, or of this thread's stack, that is in no library nor this package."""
    stack = traceback.walk_stack(sys._getframe())  # with None it skips callers
    for frame, number in reversed([*traceback.walk_tb(fault)]) if fault else stack:
        path = Path(frame.f_code.co_filename)
        is_generated = "<" in str(path)
        if is_generated or "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in _LIBRARIES):
            continue
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{number}"
    return "an unknown line"
