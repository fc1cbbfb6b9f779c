"""The parts of a section of the report, and the format of its numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradtrail.stages.report.charts import Chart
from gradtrail.stages.report.inputs import Png

Cells: TypeAlias = tuple[str, ...]

_LONG = 16  # rows; a longer table is folded
_SIGNS = "+-−–."


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A headline metric: its name, its value, and a note that helps to judge it."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as text; the first cell of each row is its heading.

    Attributes:
        folded: True if the page shows the caption alone until the reader opens the table. Long tables are folded too.
    """

    caption: str
    header: Cells
    rows: Sequence[Cells]
    folded: bool = False

    @property
    def is_folded(self) -> bool:
        """Whether the page shows the caption alone until the reader opens the table."""
        return self.folded or len(self.rows) > _LONG

    @property
    def is_numeric(self) -> tuple[bool, ...]:
        """Whether each column has numbers, some of which may be unbounded: such columns are right-aligned."""
        columns = zip(*self.rows, strict=True)
        numeric = tuple(any(cell.lstrip(_SIGNS)[:1].isdigit() for cell in column) for column in columns)
        return numeric or (False,) * len(self.header)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its caption, and a text alternative for readers who cannot see it."""

    png: Png
    caption: str
    alt: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page."""

    id: str  # target of the link in the table of contents
    title: str
    text: Sequence[str]  # paragraphs
    summary: str = ""  # sentences that replace the section while it is folded; empty if it never is
    markdown: str = ""  # text of a stage, with its headings; empty for none
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    figures: Sequence[Figure] = ()
    warning: str = ""  # a line above all else, marked; empty for none


def percent(share: float, digits: int = 2) -> str:
    """Write a share: 0.9859 → 98.59%."""
    return f"{share:.{digits}%}"


def count(number: float) -> str:
    """Write a count: 60000 → 60,000."""
    return f"{number:,.0f}"


def flops(number: float, *, at_most: bool = False) -> str:
    """Write a number of floating-point operations: 134147512 → 134 MFLOP, or at most 134 MFLOP."""
    return "at most " * at_most + _scaled(number, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def size(number: float) -> str:
    """Write a number of bytes: 5449580 → 5.20 MiB."""
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    if number < step:
        return f"{number:.0f} {units[0]}"
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / step, power + 1
    return f"{number:#.3g}".rstrip(".") + f" {units[power]}"
