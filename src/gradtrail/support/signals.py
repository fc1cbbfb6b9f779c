"""Handles requests to stop, by Ctrl-C or SIGTERM: the first one at a safe place, the second one at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_AGAIN_SECONDS = 0.05


class Stopped(KeyboardInterrupt):
    """The process was asked to stop; `args[0]` says how to continue, and `number` is the signal."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


class StopRequest:
    """Whether the process was asked to stop, and by which signal."""

    number: int | None = None

    def obey(self, message: str) -> None:
        """Raise `Stopped` if the process was asked to stop."""
        if self.number is not None:
            raise Stopped(message, self.number)


@contextlib.contextmanager
def stop_request(when_asked: Callable[[], object] = lambda: None) -> Iterator[StopRequest]:
    """Record the first Ctrl-C or SIGTERM while the block runs, for the block to obey; the second one ends the process.

    The handler of the first one calls `when_asked`.
    """
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        if request.number is not None:
            os._exit(128 + number)
        request.number = number
        when_asked()

    with handling(note, signal.SIGINT, signal.SIGTERM):
        yield request


@contextlib.contextmanager
def stopping_on_signals(message: str) -> Iterator[None]:
    """Raise `Stopped` on SIGTERM while the block runs, so that its `with` statements close what they opened."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(message, number)

    def send_again(dropped: "sys.UnraisableHookArgs") -> None:
        # Python drops an exception in a callback of its garbage collector; JAX has one. Ctrl-C too is sent again
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            number = getattr(dropped.exc_value, "number", signal.SIGINT)
            # To the main thread, whose system call it interrupts; another thread may get a signal to the process
            to_main = (threading.main_thread().ident, number)
            threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, to_main).start()
        else:
            previous_hook(dropped)

    previous_hook, sys.unraisablehook = sys.unraisablehook, send_again
    try:
        with handling(stop, signal.SIGTERM):
            yield
    finally:
        sys.unraisablehook = previous_hook


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle these signals by a function while the block runs."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)
