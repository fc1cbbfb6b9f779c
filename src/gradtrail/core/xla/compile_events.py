"""Records what JAX compiles while a block runs: how often, for how long, and which compilations were unplanned.

Counts, durations and names of functions are the public events of `jax.monitoring`. JAX sends them from the thread that
compiles, below the call that causes it, so the Python stack has the line of the project. Events carry no shapes: those
are read from JAX's log record "Compiling <function> with global shapes and types"; if a version of JAX changes that
record, shapes are unknown and nothing else changes.
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
_LOGGER = "jax._src.interpreters.pxla"
_RECORD = re.compile(r"Compiling (.+?) with global shapes and types \((.*?),?\)\. Arg")
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
LONGEST_LINE = 400  # characters of shapes in a warning
_MOST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A compilation that a call caused."""

    function: str  # name of the function in Python
    signature: str  # shapes and dtypes of its arguments
    line: str  # line of the project that called it, such as `src/gradtrail/core/train/loop.py:264`


class CompileLog:
    """Log of what JAX compiles, in all threads, while this context manager is open.

    It owns its listeners and its log handler: they are registered when the block is entered and removed when it ends.

    Attributes:
        unplanned: compilations that calls caused, in order: all except those under `planned`. A program from the
            persistent cache counts too. Empty if `jax_disable_jit` or `jax_debug_nans` was on when the block was
            entered: nothing is compiled ahead of time then.
        compilations: number of programs that were compiled or read from the persistent cache.
        requests: number of look-ups in the persistent compilation cache.
        hits: number of look-ups that found a program.
        misses: number of look-ups that did not.
        seconds: time spent on tracing, lowering and compiling, cache retrieval included.
    """

    def __init__(self) -> None:
        self.unplanned: list[Compilation] = []
        self.compilations = self.requests = self.hits = self.misses = 0
        self.seconds = 0.0
        self._lock = threading.Lock()  # threads may compile concurrently
        self._thread = threading.local()
        self._handler = logging.Handler()
        self._handler.emit = self._take_signature  # type: ignore[method-assign]

    def __enter__(self) -> "CompileLog":
        config: Any = jax.config  # mypy does not know its switches
        self._is_debugging = config.jax_disable_jit or config.jax_debug_nans
        logger = logging.getLogger(_LOGGER)
        self._before = logger.level, logger.propagate
        logger.addHandler(self._handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = bool(config.jax_log_compiles)
        jax.monitoring.register_event_listener(self._count)
        jax.monitoring.register_event_duration_secs_listener(self._time)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._time)
        jax.monitoring.unregister_event_listener(self._count)
        logger = logging.getLogger(_LOGGER)
        logger.removeHandler(self._handler)
        logger.setLevel(self._before[0])
        logger.propagate = self._before[1]

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
    def _lowered(self) -> dict[str, str]:
        """The signatures of what this thread is about to compile, by name."""
        return self._thread.__dict__.setdefault("lowered", {})

    def _take_signature(self, record: logging.LogRecord) -> None:
        """Record the shapes of what this thread is about to compile."""
        if match := _RECORD.match(record.getMessage()):
            self._lowered[match[1]] = re.sub(r"ShapedArray\(([^()]*)\)", r"\1", match[2]) or "no arguments"

    def _count(self, event: str, **_: Any) -> None:
        if name := _COUNTED.get(event):
            with self._lock:
                setattr(self, name, getattr(self, name) + 1)

    def _time(self, event: str, duration_secs: float, **about: Any) -> None:
        if not event.startswith(_DURATIONS):
            return
        with self._lock:
            self.seconds += duration_secs
            self.compilations += event == _COMPILED
        if event == _COMPILED:
            self._take_compilation(str(about.get("fun_name", "unknown function")))

    def _take_compilation(self, name: str) -> None:
        signature = self._lowered.pop(name, "unknown shapes")
        if self._is_planned or self._is_debugging:
            return
        function = re.sub(r"^\w+\((.*)\)$", r"\1", name)  # f of `jit(f)`
        compilation = Compilation(function=function, signature=signature, line=project_line())
        with self._lock:
            self.unplanned.append(compilation)


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
        if not _is_library(path):
            with contextlib.suppress(ValueError):
                path = path.relative_to(Path.cwd())
            return f"{path}:{number}"
    return "an unknown line"


def _is_library(path: Path) -> bool:
    """Return whether code belongs to an installed package, the standard library or this package, or is generated."""
    above = {str(folder) for folder in path.parents}
    is_generated = path.name.startswith("<") or str(path).startswith("<")
    return is_generated or not _INSTALLED.isdisjoint(path.parts) or bool(above & {*_STANDARD_LIBRARY, _HERE})


_HERE = str(Path(__file__).parent)
