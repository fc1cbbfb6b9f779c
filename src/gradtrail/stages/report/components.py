"""What a section of the report is made of, and how its figures are written for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradtrail.stages.report.inputs import Png

Cells: TypeAlias = tuple[str, ...]

_LONG = 16  # rows that a page shows without being asked
_SIGNS = "+-−–."


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A headline figure: what it is, its value, and what to hold it against."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as it is shown; the first cell of a row names the row.

    Attributes:
        caption: what it shows.
        folded: whether a reader opens it first; so are long ones.
    """

    caption: str
    header: Cells
    rows: Sequence[Cells]
    folded: bool = False

    @property
    def is_folded(self) -> bool:
        """Whether the page shows the caption alone until it is asked."""
        return self.folded or len(self.rows) > _LONG

    @property
    def is_numeric(self) -> tuple[bool, ...]:
        """Whether each column holds figures, of which some may be beyond measure: they stand right-aligned."""
        columns = zip(*self.rows, strict=True)
        found = tuple(any(cell.lstrip(_SIGNS)[:1].isdigit() for cell in column) for column in columns)
        return found or (False,) * len(self.header)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture with what stands below it, and what it shows in words for whoever does not see it."""

    png: Png
    caption: str
    alt: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page.

    Attributes:
        id: that the table of contents leads to.
        text: paragraphs.
        markdown: text that a stage wrote, its own headings included; empty for none.
    """

    id: str
    title: str
    text: Sequence[str]
    markdown: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


def percent(share: float, digits: int = 2) -> str:
    """Write a share: 0.9859 → 98.59%."""
    return f"{share:.{digits}%}"


def count(number: float) -> str:
    """Write a number of things: 60000 → 60,000."""
    return f"{number:,.0f}"


def flops(number: float) -> str:
    """Write a number of floating-point operations: 134147512 → 134 MFLOP."""
    return _scaled(number, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


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
