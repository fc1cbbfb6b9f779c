"""Printing for a person: as wide as the terminal, and in a log, which has no width, wide enough for whole lines.

A progress bar on stderr where a person watches, and silence where nobody does.

Out of scope: what must be on record. A bar is no log; it never writes to a file or a pipe unless told to.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LOG_WIDTH = 140


def stdout_console() -> Console:
    """Return a console on standard output, which colours nothing by itself."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_LOG_WIDTH)


Unit = Literal["bytes", "steps"]


class ProgressBar:
    """One bar, made by `progress_bar`; every call is cheap, and does nothing visible where the bar is silent."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        """Take over a task that `progress` shows."""
        self._progress = progress
        self._task = task

    def advance(self, amount: float = 1.0, *, message: str | None = None) -> None:
        """Add `amount`, in the bar's unit, to what is done; show `message`, where given, behind the bar."""
        self._progress.update(self._task, advance=amount)
        self._show(message)

    def update(self, completed: float, *, message: str | None = None) -> None:
        """Set what is done, in the bar's unit; show `message`, where given, behind the bar."""
        self._progress.update(self._task, completed=completed)
        self._show(message)

    def _show(self, message: str | None) -> None:
        """Show a message behind the bar; None keeps the last one."""
        if message is not None:
            self._progress.update(self._task, message=message)


@contextlib.contextmanager
def progress_bar(description: str, total: float, *, unit: Unit, enabled: bool | None = None) -> Iterator[ProgressBar]:
    """Show a progress bar on stderr while the block runs.

    Args:
        description: what is under way, in front of the bar.
        total: when it is done, in `unit`.
        unit: `bytes` shows sizes and speed, `steps` shows a count; both show the time left.
        enabled: whether to show the bar; None shows it when stderr is a terminal.

    Yields:
        The bar, with `advance` and `update`.
    """
    shown = sys.stderr.isatty() if enabled is None else enabled
    with Progress(*_columns(unit), console=Console(stderr=True), disable=not shown) as progress:
        yield ProgressBar(progress, progress.add_task(description, total=total, message=""))


def _columns(unit: Unit) -> tuple[ProgressColumn, ...]:
    """Return the bar's columns; texts are shown as they are, since a path or a message may hold brackets."""
    counts: tuple[ProgressColumn, ...] = (
        (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    )
    description = TextColumn("{task.description}", markup=False)
    message = TextColumn("{task.fields[message]}", markup=False)
    return (description, BarColumn(), *counts, TimeRemainingColumn(), message)
