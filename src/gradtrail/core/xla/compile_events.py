"""Records what JAX compiles while a block runs: which functions, for which shapes, and what came from the cache.

Counts and durations are the public events of `jax.monitoring`. These carry no shapes, so the signature of each compiled
call is read from JAX's log record "Compiling <function> with global shapes and types"; where a version of JAX words
that record otherwise, `CompileLog.signatures` stays empty and nothing else changes.
"""

import contextlib
import logging
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.monitoring
from jax.extend.core import primitives

_HIT = "/jax/compilation_cache/cache_hits"
_COUNTED = {
    "/jax/compilation_cache/compile_requests_use_cache": "requests",
    _HIT: "hits",
    "/jax/compilation_cache/cache_misses": "misses",
}
_DURATIONS = "/jax/core/compile/"  # tracing, lowering and compiling
_COMPILED = "/jax/core/compile/backend_compile_duration"  # one per program, on a cache hit too
_LOGGER = "jax._src.interpreters.pxla"
_PRIMITIVES = frozenset(each.name for each in vars(primitives).values() if hasattr(each, "name"))
_RECORD = re.compile(r"Compiling (?:jit\()?([^\s()]+|<lambda>)\)? with global shapes and types \((.*?),?\)\. Arg")


class CompileLog:
    """What JAX compiles, in all threads, while this context manager is open.

    It owns its listeners and its log handler: they are registered when the block is entered and removed when it ends.

    Attributes:
        signatures: function → shapes and dtypes of each compilation that a call of a jitted function caused, in order.
            What is compiled under `ahead_of_time` is left out.
        compilations: programs made ready, compiled or read from the persistent cache.
        requests: look-ups in the persistent compilation cache.
        hits: look-ups that found a program.
        misses: look-ups that did not.
        seconds: spent on tracing, lowering and compiling, cache retrieval included.
    """

    def __init__(self) -> None:
        self.signatures: dict[str, list[str]] = defaultdict(list)
        self.compilations = self.requests = self.hits = self.misses = 0
        self.seconds = 0.0
        self._lock = threading.Lock()  # threads may compile side by side
        self._thread = threading.local()
        self._handler = logging.Handler()
        self._handler.emit = self._take_signature  # type: ignore[method-assign]

    def __enter__(self) -> "CompileLog":
        logger = logging.getLogger(_LOGGER)
        self._before = logger.level, logger.propagate
        logger.addHandler(self._handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
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
    def ahead_of_time(self) -> Iterator[None]:
        """Mark what this thread compiles in the block as compiled on purpose: it is counted, but is no retrace."""
        before = self._is_ahead_of_time
        self._thread.ahead_of_time = True
        try:
            yield
        finally:
            self._thread.ahead_of_time = before

    def retraced(self) -> dict[str, list[str]]:
        """Return the functions that calls compiled for more than one signature, with all of their signatures.

        JAX's own functions and primitives are left out: called outside `jit`, they are compiled for each shape.
        """
        return {
            name: found
            for name, signatures in self.signatures.items()
            if len(found := list(dict.fromkeys(signatures))) > 1 and not _is_of_jax(name)
        }

    @property
    def _is_ahead_of_time(self) -> bool:
        return getattr(self._thread, "ahead_of_time", False)

    def _take_signature(self, record: logging.LogRecord) -> None:
        found = _RECORD.match(record.getMessage())
        if found and not self._is_ahead_of_time:
            with self._lock:
                self.signatures[found[1]].append(re.sub(r"ShapedArray\(([^()]*)\)", r"\1", found[2]))

    def _count(self, event: str, **_: Any) -> None:
        if name := _COUNTED.get(event):
            with self._lock:
                setattr(self, name, getattr(self, name) + 1)

    def _time(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith(_DURATIONS):
            with self._lock:
                self.seconds += duration_secs
                self.compilations += event == _COMPILED


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Yield a list that gets an entry for each program that this thread reads from the persistent compilation cache."""
    found, thread = [], threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        if event == _HIT and threading.get_ident() == thread:
            found.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(listen)


def differences(signatures: list[str]) -> str:
    """Describe where signatures of one function differ: `argument 6: uint8[32,28,28], uint8[128,28,28]`."""
    columns = zip(*(re.findall(r"[^,\s]+?\[[^\]]*\]|[^,\s]+", each) for each in signatures), strict=False)
    differing = [
        f"argument {place}: {', '.join(dict.fromkeys(column))}"
        for place, column in enumerate(columns, start=1)
        if len(set(column)) > 1
    ]
    return "; ".join(differing) or ", then ".join(signatures)


def _is_of_jax(name: str) -> bool:
    modules = (jax.numpy, jax.lax, jax.random, jax.nn)
    return name.startswith("_") or name in _PRIMITIVES or any(hasattr(module, name) for module in modules)
