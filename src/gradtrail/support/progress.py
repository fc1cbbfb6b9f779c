"""Progress bars on stderr, and the console for tables on stdout.

A bar is drawn only on a terminal. `ProgressBar.print` always writes a line: above the bar on a terminal, by itself in a
pipe or a log; `ProgressBar.log`, and `ProgressBar.advance` with a message, only where there is no bar.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Literal

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
from rich.segment import Segment

from gradtrail.support.errors import printable

_LOG_WIDTH = 140  # columns if there is no terminal


class _PlainConsole(Console):
    """Prints texts without markup, with control characters escaped."""

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        for text, style, control in super().render(*args, **kwargs):
            yield Segment(text if control else printable(text), style, control)


def stdout_console() -> Console:
    """Return a console on standard output that prints texts as they are, control characters escaped."""
    console = _PlainConsole(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


Unit = Literal["bytes", "steps"]


class ProgressBar:
    """The bar of a `progress_bar` block. Every call is cheap."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        """Wrap a task of `progress`."""
        self._progress = progress
        self._task = task

    def advance(self, amount: float = 1.0, *, message: str | None = None) -> None:
        """Add `amount`, in the bar's unit; show `message`, if given, behind the bar; without one, in a line."""
        self._progress.update(self._task, advance=amount)
        self._show(message)
        if message is not None:
            (task,) = self._progress.tasks
            self.log(f"{task.description}: {message} ({task.percentage:.0f} %, {task.elapsed or 0.0:.1f} s)")

    def update(self, completed: float, *, message: str | None = None) -> None:
        """Set the completed amount, in the bar's unit; show `message`, if given, behind the bar."""
        self._progress.update(self._task, completed=completed)
        self._show(message)

    def print(self, line: str) -> None:
        """Print a line on stderr, above the bar if there is one."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def log(self, line: str) -> None:
        """Print a line on stderr if no bar is drawn."""
        if self._progress.disable:
            self.print(line)

    def _show(self, message: str | None) -> None:
        """Show a message behind the bar; None keeps the last one."""
        if message is not None:
            self._progress.update(self._task, message=message)


@contextlib.contextmanager
def progress_bar(description: str, total: float, *, unit: Unit, enabled: bool | None = None) -> Iterator[ProgressBar]:
    """Show a progress bar on stderr while the block runs.

    Args:
        description: text in front of the bar.
        total: amount at which the work is done, in `unit`.
        unit: `bytes` shows sizes and speed, `steps` shows a count; both show the time left.
        enabled: whether to show the bar; None shows it when stderr is a terminal.

    Yields:
        The bar.
    """
    is_shown = sys.stderr.isatty() if enabled is None else enabled
    with Progress(*_columns(unit), console=Console(stderr=True), disable=not is_shown) as progress:
        yield ProgressBar(progress, progress.add_task(description, total=total, message=""))


def _columns(unit: Unit) -> tuple[ProgressColumn, ...]:
    """Return the bar's columns. Texts are not markup: a path or a message may contain brackets."""
    counts: tuple[ProgressColumn, ...] = (
        (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    )
    description = TextColumn("{task.description}", markup=False)
    message = TextColumn("{task.fields[message]}", markup=False)
    return (description, BarColumn(), *counts, TimeRemainingColumn(), message)
