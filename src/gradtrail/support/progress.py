"""Progress bars on stderr, and the console for tables on stdout. A bar is drawn only on a terminal."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import rich.progress
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.text import Text

from gradtrail.support.errors import printable

_FILE_WIDTH = 10_000  # columns of a file or a pipe: more than any table needs
_BLOCKS = "▁▂▃▄▅▆▇█"
_LABEL_WIDTH, _RANGE_WIDTH = 18, 18  # columns before and after a curve
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
        console.width = _FILE_WIDTH
    return console


def sparkline(values: np.ndarray, width: int) -> str:
    """Return a curve as blocks, on a logarithmic scale between its lowest and its highest block.

    Args:
        values: Values at equal distances, NaN for those that are not known yet; not negative.
        width: Number of blocks; each is the mean of its finite values, or a space if it has none.
    """
    # Each block has at least one value; a value may belong to several blocks
    starts = np.arange(width) * len(values) // width
    stops = np.maximum(starts + 1, np.arange(1, width + 1) * len(values) // width)
    parts = [values[start:stop] for start, stop in zip(starts, stops, strict=True)]
    finite_parts = [part[np.isfinite(part)] for part in parts]
    means = np.array([part.mean() if len(part) else np.nan for part in finite_parts])

    positive = means[means > 0]
    if not len(positive):
        return "".join(" " if np.isnan(mean) else _BLOCKS[0] for mean in means)
    low, high = np.log(positive.min()), np.log(positive.max())
    shares = (np.log(np.maximum(means, positive.min())) - low) / max(high - low, 1e-9)
    heights = shares * (len(_BLOCKS) - 1)
    return "".join(" " if np.isnan(height) else _BLOCKS[round(height)] for height in heights)


class _Progress(rich.progress.Progress):
    """A progress display with lines below the bar."""

    lines: Sequence[Text] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from (*super().get_renderables(), *self.lines)


class ProgressBar:
    """The bar of a `progress_bar` block; amounts are in its unit."""

    last: "ProgressBar | None" = None  # the one that was shown last

    def __init__(self, progress: _Progress, task: rich.progress.TaskID) -> None:
        self._progress, self._task = progress, task

    def __str__(self) -> str:
        (task,) = self._progress.tasks
        return f"{task.description} at {task.completed:,.0f} of {task.total:,.0f}"

    @property
    def is_drawn(self) -> bool:
        """Whether stderr is a terminal."""
        return not self._progress.disable

    def advance(self, amount: float = 1.0, *, message: str | None = None) -> None:
        """Add an amount; show a message behind the bar, or in a line if no bar is drawn."""
        self._update(message, advance=amount)
        if message is not None:
            (task,) = self._progress.tasks
            self.log(f"{task.description}: {message} ({task.percentage:.0f} %, {task.elapsed or 0.0:.1f} s)")

    def update(self, completed: float, *, message: str | None = None) -> None:
        """Set the completed amount; show a message behind the bar."""
        self._update(message, completed=completed)

    def draw(self, curves: Mapping[str, tuple[np.ndarray, str]]) -> None:
        """Draw curves below the bar: name → values as in `sparkline`, and the format of the first and the last."""
        width = self._progress.console.width - _LABEL_WIDTH - _RANGE_WIDTH
        lines = []
        for name, (values, form) in curves.items():
            finite = values[np.isfinite(values)]
            ends = f"{finite[0]:{form}} → {finite[-1]:{form}}" if len(finite) else ""
            lines.append(Text(f"{name:<{_LABEL_WIDTH}}{sparkline(values, width)} {ends}", no_wrap=True))
        self._progress.lines = lines if width > 0 else ()

    def print(self, line: str) -> None:
        """Print a line on stderr, above the bar if there is one."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def log(self, line: str) -> None:
        """Print a line on stderr if no bar is drawn."""
        if not self.is_drawn:
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
    with _Progress(*columns, console=console, disable=is_hidden) as progress:
        ProgressBar.last = ProgressBar(progress, progress.add_task(description, total=total, message=""))
        yield ProgressBar.last
