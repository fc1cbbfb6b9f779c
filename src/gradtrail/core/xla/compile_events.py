"""What JAX compiles in a while, whoever asked: which functions, for which shapes, and what came from the cache."""

import contextlib
import logging
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.monitoring

_LOGGER = "jax._src.interpreters.pxla"  # which tells of each compilation, at level DEBUG
_COMPILING = re.compile(r"Compiling (?:jit\()?([^\s()]+|<lambda>)\)? with global shapes and types \((.*?),?\)\. Arg")
_COUNTED = {
    "/jax/compilation_cache/compile_requests_use_cache": "requests",
    "/jax/compilation_cache/cache_hits": "hits",
    "/jax/compilation_cache/cache_misses": "misses",
}
_TIMED = "/jax/core/compile/"  # tracing, lowering and compiling; the last one fires on a cache hit too
_logs: list["CompileLog"] = []
_lock = threading.Lock()  # of the logs: functions may be compiled side by side


class _OfThread(threading.local):
    """What JAX told in this thread, which is the one that asked."""

    hits = 0  # of the persistent compilation cache
    asked_for = 0  # blocks of `asked_for` that are open


_here = _OfThread()


@dataclass
class CompileLog:
    """What was compiled while the log was open.

    Attributes:
        signatures: by function, the shapes and dtypes of each compilation that a call brought about, in order.
        asked_for: compilations that somebody asked for, ahead of time.
        requests: questions to the persistent compilation cache.
        hits: those that it answered.
        misses: those that it did not.
        seconds: of tracing, lowering and compiling, the cache's retrievals included.
    """

    signatures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    asked_for: int = 0
    requests: int = 0
    hits: int = 0
    misses: int = 0
    seconds: float = 0.0

    @property
    def compilations(self) -> int:
        """How many programs were made ready, compiled or from the cache."""
        return self.asked_for + sum(map(len, self.signatures.values()))

    def retraced(self) -> dict[str, list[str]]:
        """Return the functions that were compiled for more than one signature, with all of theirs.

        JAX's own are left out: an operation that is called by itself is compiled for each shape that it meets.
        """
        return {
            name: found
            for name, signatures in self.signatures.items()
            if len(found := list(dict.fromkeys(signatures))) > 1 and not _is_of_jax(name)
        }


@contextlib.contextmanager
def compile_log() -> Iterator[CompileLog]:
    """Yield a log that fills as long as the block runs."""
    log, handler, logger = CompileLog(), logging.Handler(), logging.getLogger(_LOGGER)

    def take(record: logging.LogRecord) -> None:
        found = _COMPILING.match(record.getMessage())
        if found and not _here.asked_for:
            with _lock:
                log.signatures[found[1]].append(_short(found[2]))

    handler.emit = take  # type: ignore[method-assign]
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextlib.contextmanager
def asked_for() -> Iterator[None]:
    """Mark what is compiled in the block as one program that was asked for: no call came with unexpected shapes."""
    _here.asked_for += 1
    with _lock:
        for log in _logs:
            log.asked_for += 1
    try:
        yield
    finally:
        _here.asked_for -= 1


def differences(signatures: list[str]) -> str:
    """Say where signatures of one function differ: `argument 6: uint8[32,28,28], uint8[128,28,28]`."""
    columns = list(zip(*(_arguments(each) for each in signatures), strict=False))
    told = [
        f"argument {place}: {', '.join(dict.fromkeys(column))}"
        for place, column in enumerate(columns, start=1)
        if len(set(column)) > 1
    ]
    return "; ".join(told) or ", then ".join(signatures)


def cache_hits() -> int:
    """Return how many programs this thread has had from the persistent compilation cache."""
    return _here.hits


def _short(arguments: str) -> str:
    return re.sub(r"ShapedArray\(([^()]*)\)", r"\1", arguments)


def _arguments(signature: str) -> list[str]:
    return re.findall(r"[^,\s]+?\[[^\]]*\]|[^,\s]+", signature)


def _is_of_jax(name: str) -> bool:
    return name.startswith("_") or any(hasattr(module, name) for module in (jax.numpy, jax.lax, jax.random, jax.nn))


def _count(event: str, **_: Any) -> None:
    _here.hits += event == "/jax/compilation_cache/cache_hits"
    if name := _COUNTED.get(event):
        with _lock:
            for log in _logs:
                setattr(log, name, getattr(log, name) + 1)


def _time(event: str, duration_secs: float, **_: Any) -> None:
    if event.startswith(_TIMED):
        with _lock:
            for log in _logs:
                log.seconds += duration_secs


jax.monitoring.register_event_listener(_count)
jax.monitoring.register_event_duration_secs_listener(_time)
