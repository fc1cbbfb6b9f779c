"""Tables for the terminal and in Markdown; seconds as text."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradtrail.support.tables import TextTable, duration, markdown_table

WORDS = st.text("ab", min_size=1, max_size=12)
CELLS = st.lists(WORDS, max_size=6).map(" ".join)


def printed(table: TextTable, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), markup=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@given(st.integers(1, 9).flatmap(lambda count: st.lists(st.lists(CELLS, min_size=count, max_size=count), min_size=1)))
def test_every_word_is_whole_and_no_line_is_wider_than_the_console(cells: list[list[str]]) -> None:
    rows = [{f"c{number}": cell for number, cell in enumerate(row)} for row in cells]
    lines = printed(TextTable("", rows, right=["c1"]), width=40)
    assert max(map(len, lines)) <= 40
    words = [word for line in lines for word in line.split() if word[0] in "ab"]
    first = sorted(word for row in rows for word in row["c0"].split())
    times_of_first = sum(line.split()[:1] == ["c0"] for line in lines)
    expected = [word for row in rows for column, cell in row.items() if column != "c0" for word in cell.split()]
    assert sorted(words) == sorted(first * times_of_first + expected)


def test_columns_without_space_follow_below_the_first_one_again() -> None:
    rows = [{"name": "one", "long": "x" * 20, "other": "y" * 20, "last": "2"}]
    texts = [[" ".join(line.split()) for line in printed(TextTable("title", rows), width)] for width in (40, 80)]
    narrow, wide = ([text for text in lines if text.strip("─")] for lines in texts)
    assert narrow == ["title", "name long", f"one {'x' * 20}", "name other last", f"one {'y' * 20} 2"]
    assert wide == ["title", "name long other last", f"one {'x' * 20} {'y' * 20} 2"]


def test_word_wider_than_the_console_is_folded_and_not_cut() -> None:
    lines = printed(TextTable("", [{"key": "k" * 30, "value": "v" * 70}]), width=40)
    assert max(map(len, lines)) <= 40
    assert ("".join(lines).count("k"), "".join(lines).count("v")) == (31, 71)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (0.0364, "0.036 s"), (99.4, "99 s"), (99.5, "1.7 min"), (4776.5, "80 min"), (-7200, "-2.0 h")],
)
def test_seconds_have_two_digits_and_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_cell_cannot_break_its_row_or_hide_as_a_tag() -> None:
    rows = [{"function": "<lambda>", "why": "a | b\nc"}]
    assert markdown_table(rows) == "| function | why |\n| --- | --- |\n| &lt;lambda&gt; | a &#124; b c |"
