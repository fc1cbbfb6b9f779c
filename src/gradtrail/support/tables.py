"""Tables for the terminal, all in one style, and in Markdown; seconds as text."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table

_WRAPPED_SHARE = 0.3  # of the console's width; wider columns may be broken at spaces
_GAP = 2  # characters after each column; one more is before the first
_WORD = re.compile(r"^ *\S*|\S+")  # of a cell; the first one with its indentation


@dataclass(frozen=True)
class TextTable:
    """A table that fits the console: further columns follow in a table below, after the first column again."""

    title: str
    rows: Sequence[Mapping[str, str]]  # columns are the keys of the first
    right: Collection[str] = ()  # columns that are aligned right, such as numbers
    styles: Sequence[str | None] = ()  # styles of the rows, such as `bold green`

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        columns = self.rows[0] if self.rows else ()
        cells = {column: [column, *(row[column] for row in self.rows)] for column in columns}
        natural = {column: max(map(cell_len, texts)) + _GAP for column, texts in cells.items()}
        space, wrapped = options.max_width - 1, int(_WRAPPED_SHARE * options.max_width)
        blocks: list[dict[str, int]] = [{}]  # the columns of each table → width
        for column, texts in cells.items():
            longest_word = max(cell_len(word) for text in texts for word in _WORD.findall(text)) + _GAP
            width = min(natural[column], max(wrapped, longest_word))
            if len(blocks[-1]) > 1 and sum(blocks[-1].values()) + width > space:
                first = next(iter(cells))
                blocks.append({first: blocks[0][first]})
            blocks[-1][column] = width

        for block in blocks:
            title = self.title if block is blocks[0] else None
            table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            left = space - sum(block.values())
            for column, width in reversed(block.items()):  # the last one gets what is left, or is folded
                extra = min(natural[column] - width, left)
                block[column], left = max(width + extra, _GAP + 1), left - extra
            for column, width in block.items():
                justify = "right" if column in self.right else "left"
                table.add_column(column, justify=justify, overflow="fold", width=width - _GAP)  # type: ignore[arg-type]
            for row, style in zip(self.rows, self.styles or [None] * len(self.rows), strict=True):
                table.add_row(*(row[column] for column in block), style=style)
            yield table


def duration(seconds: float, sign: str = "") -> str:
    """Return seconds with two digits, in seconds, minutes or hours; `sign` is that of a format, such as `+`.

    >>> [duration(seconds) for seconds in (0.364, 99.4, 99.5, 4776.5)]
    ['0.36 s', '99 s', '1.7 min', '80 min']
    """
    value, unit = seconds, "s"
    for longer in ("min", "h"):
        if abs(value) >= 99.5:
            value, unit = value / 60, longer
    return f"{value:{sign}.0f} {unit}" if abs(value) >= 9.95 else f"{value:{sign}#.2g} {unit}"


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return at least one row as a table in Markdown, whose columns are the keys of the first."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(map(_markdown_cell, cells))} |" for cells in lines)


def _markdown_cell(text: str) -> str:
    return escape(text, quote=False).replace("|", "&#124;").replace("\n", " ")
