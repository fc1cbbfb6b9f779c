"""Progress bars on stderr, and the console for tables on stdout. A bar is drawn only on a terminal."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Literal

import rich.progress
from rich.console import Console
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

    def __init__(self, progress: rich.progress.Progress, task: rich.progress.TaskID) -> None:
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
    """Show a bar, from 0 to a total amount, on stderr while the block runs; bytes are shown as sizes and speed."""
    counts: list[rich.progress.ProgressColumn] = [rich.progress.MofNCompleteColumn()]
    if unit == "bytes":
        counts = [rich.progress.DownloadColumn(), rich.progress.TransferSpeedColumn()]
    # Not markup: a path or a message may contain brackets
    label, message = (
        rich.progress.TextColumn(f"{{task.{text}}}", markup=False) for text in ("description", "fields[message]")
    )
    columns = (label, rich.progress.BarColumn(), *counts, rich.progress.TimeRemainingColumn(), message)
    console, is_hidden = Console(stderr=True), not sys.stderr.isatty()
    with rich.progress.Progress(*columns, console=console, disable=is_hidden) as progress:
        yield ProgressBar(progress, progress.add_task(description, total=total, message=""))
