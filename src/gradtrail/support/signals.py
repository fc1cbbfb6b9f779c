"""Handles requests to stop, by Ctrl-C or SIGTERM: the first one at a safe place, the second one at once."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN_SECONDS = 0.05


class Stopped(KeyboardInterrupt):
    """The process was asked to stop; `args[0]` says how to continue, and `number` is the signal."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


class StopRequest:
    """Whether the process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.number: int | None = None

    def obey(self, message: str) -> None:
        """Raise `Stopped` if the process was asked to stop."""
        if self.number is not None:
            raise Stopped(message, self.number)


@contextlib.contextmanager
def stop_request(when_asked: Callable[[], object] = lambda: None) -> Iterator[StopRequest]:
    """Record the first Ctrl-C or SIGTERM while the block runs, for the block to obey; the second one ends the process.

    Args:
        when_asked: Function called in the signal handler, at the first signal.
    """
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        if request.number is not None:
            os._exit(128 + number)
        request.number = number
        when_asked()

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stopping_on_signals(message: str) -> Iterator[None]:
    """Raise `Stopped` on SIGTERM while the block runs, so that its `with` statements close what they opened.

    Python only prints what is raised in a callback of its garbage collector, or as an object is deleted, and goes on. A
    request to stop that came there, also Ctrl-C, is raised again instead of printed: by a timer (SIGALRM), or as the
    block ends.
    """
    dropped: list[KeyboardInterrupt] = []

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(message, number)

    def keep(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(error := unraisable.exc_value, KeyboardInterrupt):
            before_hook(unraisable)
            return
        dropped.append(error)
        # Repeated: a tick that comes just before a system call begins to wait does not end the wait.
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)

    def raise_dropped(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if dropped:
            error = dropped.pop()
            dropped.clear()
            raise error.with_traceback(None)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, stop),
        signal.SIGALRM: signal.signal(signal.SIGALRM, raise_dropped),
    }
    before_hook, sys.unraisablehook = sys.unraisablehook, keep
    try:
        yield
        raise_dropped()
    finally:
        dropped.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = before_hook
        for number, handler in before.items():
            signal.signal(number, handler)
