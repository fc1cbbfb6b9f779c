"""Records what JAX compiles while a block runs: how often, for how long, and which compilations were unplanned.

Counts, durations and names are those of the events of `jax.monitoring`. JAX sends them from the thread that compiles,
below the call that causes it, so the Python stack has the line of the project. Shapes are read from JAX's log record
"Compiling <function> with global shapes and types"; they are unknown if a version of JAX changes that record.
"""

import contextlib
import logging
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.monitoring

_HIT = "/jax/compilation_cache/cache_hits"
_COUNTED = {
    "/jax/compilation_cache/compile_requests_use_cache": "requests",
    _HIT: "hits",
    "/jax/compilation_cache/cache_misses": "misses",
}
_DURATIONS = "/jax/core/compile/"  # tracing, lowering and compiling
_COMPILED = "/jax/core/compile/backend_compile_duration"  # one per program, on a cache hit too
_LOGGER = logging.getLogger("jax._src.interpreters.pxla")
_RECORD = re.compile(r"Compiling (.+?) with global shapes and types \((.*?),?\)\. Arg")
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parent)
LONGEST_LINE = 400  # characters of shapes in a warning
_MOST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A compilation that a call caused."""

    function: str  # name of the function in Python
    signature: str  # shapes and dtypes of its arguments
    line: str  # line of the project that called it, such as `src/gradtrail/core/train/loop.py:264`


class CompileLog:
    """Log of what JAX compiles, in all threads, while this context manager is open."""

    def __init__(self) -> None:
        # Compilations that calls caused, programs from the persistent cache included: all except those under
        # `planned`. Empty if `jax_disable_jit` or `jax_debug_nans` is on: then nothing is compiled ahead of time.
        self.unplanned: list[Compilation] = []
        self.compilations = 0  # programs that were compiled or read from the persistent cache
        self.requests = self.hits = self.misses = 0  # look-ups in the persistent cache
        self.seconds = 0.0  # time spent on tracing, lowering, compiling and reading the cache
        self._lock = threading.Lock()  # threads may compile concurrently
        self._thread = threading.local()  # per thread: `is_planned`, and `signatures` by name of the function

    def __enter__(self) -> "CompileLog":
        config: Any = jax.config  # mypy does not know its switches
        self._is_debugging = config.jax_disable_jit or config.jax_debug_nans
        self._level = _LOGGER.level
        _LOGGER.setLevel(logging.DEBUG)
        _LOGGER.addFilter(self._take_signature)
        jax.monitoring.register_event_listener(self._count)
        jax.monitoring.register_event_duration_secs_listener(self._time)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._time)
        jax.monitoring.unregister_event_listener(self._count)
        _LOGGER.removeFilter(self._take_signature)
        _LOGGER.setLevel(self._level)

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
    def _is_planned(self) -> bool:
        return getattr(self._thread, "is_planned", False)

    @property
    def _signatures(self) -> dict[str, str]:
        return self._thread.__dict__.setdefault("signatures", {})

    def _take_signature(self, record: logging.LogRecord) -> bool:
        """Record the shapes of what this thread is about to compile; pass on what JAX logs without this log too."""
        if match := _RECORD.match(record.getMessage()):
            self._signatures[match[1]] = re.sub(r"ShapedArray\(([^()]*)\)", r"\1", match[2]) or "no arguments"
        return record.levelno > logging.DEBUG

    def _count(self, event: str, **_: Any) -> None:
        if name := _COUNTED.get(event):
            with self._lock:
                setattr(self, name, getattr(self, name) + 1)

    def _time(self, event: str, duration_secs: float, **details: Any) -> None:
        if not event.startswith(_DURATIONS):
            return
        with self._lock:
            self.seconds += duration_secs
            self.compilations += event == _COMPILED
        if event == _COMPILED:
            name = str(details.get("fun_name", "unknown function"))
            signature = self._signatures.pop(name, "unknown shapes")
            if not (self._is_planned or self._is_debugging):
                function = re.sub(r"^\w+\((.*)\)$", r"\1", name)  # f of `jit(f)`
                self.unplanned.append(Compilation(function=function, signature=signature, line=project_line()))


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


def describe(compilations: Sequence[Compilation]) -> list[str]:
    """Describe unplanned compilations in a line per function and place, 20 at most and one for the rest."""
    by_place: dict[tuple[str, str], list[str]] = {}
    for compilation in compilations:
        by_place.setdefault((compilation.function, compilation.line), []).append(compilation.signature)
    lines = []
    for (function, line), signatures in by_place.items():
        times = "once" if len(signatures) == 1 else f"{len(signatures)} times"
        shapes = differences(list(dict.fromkeys(signatures)))
        lines.append(f"{function} was compiled {times} by a call at {line}; {shapes[:LONGEST_LINE]}")
    left_out = lines[_MOST_LINES:]
    return lines[:_MOST_LINES] + [f"{len(left_out)} more functions were compiled by calls"] * bool(left_out)


def differences(signatures: list[str]) -> str:
    """Describe the arguments in which signatures differ: `argument 6: uint8[32,28,28], uint8[128,28,28]`."""
    columns = zip(*(re.findall(r"[^,\s]+?\[[^\]]*\]|[^,\s]+", signature) for signature in signatures), strict=False)
    differing = [
        f"argument {place}: {', '.join(dict.fromkeys(column))}"
        for place, column in enumerate(columns, start=1)
        if len(set(column)) > 1
    ]
    return "; ".join(differing) or ", then ".join(signatures)


def project_line() -> str:
    """Return the innermost line on this thread's stack that is neither in a library nor in this package."""
    for frame, number in traceback.walk_stack(sys._getframe()):  # with None it skips callers
        path = Path(frame.f_code.co_filename)
        is_generated = "<" in str(path)
        if is_generated or "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in _LIBRARIES):
            continue
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{number}"
    return "an unknown line"
