"""Calls of MLflow's store, made one after another by a thread of their own, so that a stage waits little for them.

The thread is never joined: a request that hangs does not delay the end of the process either.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_HURRIED_SECONDS = 2.0
_SLICE_SECONDS = 0.1  # after which a waiting thread checks its limit, which `hurry` may have lowered


class StoreTooSlowError(TimeoutError):
    """The store took longer than the time that a stage may wait for it."""


class StoreCalls:
    """Makes calls in order, and waits for them no longer than `seconds` in all.

    Args:
        seconds: the longest time to wait, summed over all calls; None for no limit.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._waited = 0.0
        self._waiting_since: float | None = None
        self._queue: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Call[Any] | None = None
        self._offered: _Call[Any] | None = None

    @property
    def waited(self) -> float:
        """Seconds spent waiting, until now."""
        return self._waited + (time.monotonic() - self._waiting_since if self._waiting_since is not None else 0.0)

    def wait(self, action: Callable[[], T]) -> T:
        """Make a call, wait for its end and return its result.

        Raises:
            StoreTooSlowError: the time is up; a call that has begun goes on unattended.
            Exception: the fault of this call, or of one that was offered before.
        """
        self._settle_offered()
        call = self._start(action)
        try:
            self._await(call)
        finally:
            call.unwanted = not call.done.is_set()
        return call.outcome()

    def offer(self, action: Callable[[], object]) -> bool:
        """Start a call without waiting for it, unless another one is in progress.

        Returns:
            Whether it was started; otherwise it is dropped.

        Raises:
            Exception: the fault of a call that was offered before.
        """
        if self._last and not self._last.done.is_set():
            return False
        self._settle_offered()
        self._offered = self._start(action)
        return True

    def hurry(self) -> None:
        """Lower the limit to two more seconds, as the process is asked to end; without a limit there remains none.

        May be called from a signal handler.
        """
        if self._seconds is not None:
            self._seconds = min(self._seconds, self.waited + _HURRIED_SECONDS)

    def close(self) -> None:
        """Let the thread end after the call in progress."""
        self._queue.put(None)

    def _start(self, action: Callable[[], T]) -> _Call[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="StoreCalls", daemon=True)
            self._thread.start()
        call = _Call(action)
        self._last = call
        self._queue.put(call)
        return call

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.make()

    def _settle_offered(self) -> None:
        """Wait for the call that was offered last, and raise its fault."""
        offered = self._offered
        if offered is not None:
            self._await(offered)
            self._offered = None
            offered.outcome()

    def _await(self, call: _Call[Any]) -> None:
        self._waiting_since = time.monotonic()
        try:
            while not call.done.wait(self._next_slice()):
                if self._is_over():
                    raise StoreTooSlowError(f"no answer within {self._seconds:.3g} s in all")
        finally:
            self._waited, self._waiting_since = self.waited, None

    def _next_slice(self) -> float:
        return _SLICE_SECONDS if self._seconds is None else max(0.0, min(_SLICE_SECONDS, self._seconds - self.waited))

    def _is_over(self) -> bool:
        return self._seconds is not None and self.waited >= self._seconds


class _Call(Generic[T]):
    """A call with its outcome."""

    def __init__(self, action: Callable[[], T]):
        self.done = threading.Event()
        self.unwanted = False
        self._action = action
        self._result: list[T] = []
        self._fault: BaseException | None = None

    def make(self) -> None:
        """Make the call, unless it is unwanted by now."""
        try:
            if not self.unwanted:
                self._result.append(self._action())
        except BaseException as fault:  # raised again in the thread that waits
            self._fault = fault
        finally:
            self.done.set()

    def outcome(self) -> T:
        """Return the result, or raise the fault, of a call that is done."""
        if self._fault is not None:
            raise self._fault
        return self._result[0]
