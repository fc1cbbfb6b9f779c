"""Printing for a person: as wide as the terminal, and in a log, which has no width, wide enough for whole lines."""

from rich.console import Console

_LOG_WIDTH = 140


def stdout_console() -> Console:
    """Return a console on standard output, which colours nothing by itself."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_LOG_WIDTH)
