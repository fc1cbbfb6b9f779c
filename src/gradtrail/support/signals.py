"""Handles requests to stop, by Ctrl-C, SIGTERM or a closed terminal: the first at a safe place, the second at once.

A signal that was ignored when the process started stays ignored: `nohup` asks for that, and so does a shell without job
control for what it starts in the background.
"""

import contextlib
import os
import signal
import stat
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
    """Record the first request to stop while the block runs, for the block to obey; the second one ends the process.

    The handler of the first one calls `when_asked`.
    """
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        if request.number is not None:
            os._exit(128 + number)
        request.number = number
        when_asked()

    with handling(note, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield request


@contextlib.contextmanager
def stopping_on_signals(message: str) -> Iterator[None]:
    """Raise `Stopped` on SIGTERM and SIGHUP in the block, so that its `with` statements close what they opened."""

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
        with handling(stop, signal.SIGTERM, signal.SIGHUP):
            yield
    finally:
        sys.unraisablehook = previous_hook


def _leave_closed_terminal() -> None:
    """Write to nowhere if the terminal is gone, as any output would be a fault before the work is saved."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it was closed at the start
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle these signals by a function while the block runs, SIGHUP once; those that are ignored stay so."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)  # a shell whose terminal closed repeats it
            _leave_closed_terminal()
        handler(number, frame)

    previous = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number in numbers if previous[number] != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in handled:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, previous[number])
