"""Tables for the terminal, all in one style, and in Markdown."""

from collections.abc import Collection, Mapping, Sequence
from html import escape

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def table(
    title: str,
    rows: Sequence[Mapping[str, str | Text]],
    right: Collection[str] = (),  # columns that are aligned right, such as numbers
    *,
    no_wrap: Collection[str] = (),  # columns whose cells are never broken into two lines
    styles: Sequence[str | None] = (),  # styles of the rows, such as `bold green`
) -> Table:
    """Return a table whose columns are the keys of the first row."""
    result = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in rows[0] if rows else ():
        justify = "right" if column in right else "left"
        result.add_column(column, justify=justify, overflow="fold", no_wrap=column in no_wrap)  # type: ignore[arg-type]
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        result.add_row(*row.values(), style=style)
    return result


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return at least one row as a table in Markdown, whose columns are the keys of the first."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(map(_markdown_cell, cells))} |" for cells in lines)


def _markdown_cell(text: str) -> str:
    return escape(text, quote=False).replace("|", "&#124;").replace("\n", " ")
