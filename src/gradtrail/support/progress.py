"""Progress bars on stderr, and the console for tables on stdout. A bar is drawn only on a terminal."""

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
Unit = Literal["bytes", "steps"]


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


class ProgressBar:
    """The bar of a `progress_bar` block; amounts are in its unit."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float = 1.0, *, message: str | None = None) -> None:
        """Add an amount; show a message behind the bar, or in a line if no bar is drawn."""
        self._update(message, advance=amount)
        if message is not None:
            (task,) = self._progress.tasks
            self.log(f"{task.description}: {message} ({task.percentage:.0f} %, {task.elapsed or 0.0:.1f} s)")

    def update(self, completed: float, *, message: str | None = None) -> None:
        """Set the completed amount; show a message behind the bar."""
        self._update(message, completed=completed)

    def print(self, line: str) -> None:
        """Print a line on stderr, above the bar if there is one."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def log(self, line: str) -> None:
        """Print a line on stderr if no bar is drawn."""
        if self._progress.disable:
            self.print(line)

    def _update(self, message: str | None, **amount: float) -> None:
        fields = {} if message is None else {"message": message}  # else the last message stays
        self._progress.update(self._task, **amount, **fields)  # type: ignore[arg-type]


@contextlib.contextmanager
def progress_bar(description: str, total: float, *, unit: Unit) -> Iterator[ProgressBar]:
    """Show a progress bar on stderr while the block runs.

    Args:
        description: Text in front of the bar.
        total: Amount at which the work is done.
        unit: `bytes` shows sizes and speed, `steps` shows a count; both show the time left.
    """
    counts: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    )
    # Not markup: a path or a message may contain brackets
    before, after = (TextColumn(f"{{task.{text}}}", markup=False) for text in ("description", "fields[message]"))
    columns = (before, BarColumn(), *counts, TimeRemainingColumn(), after)
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        yield ProgressBar(progress, progress.add_task(description, total=total, message=""))
