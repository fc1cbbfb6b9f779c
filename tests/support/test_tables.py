"""Tables in Markdown."""

from gradtrail.support.tables import markdown_table


def test_cell_cannot_break_its_row_or_hide_as_a_tag() -> None:
    rows = [{"function": "<lambda>", "why": "a | b\nc"}]
    assert markdown_table(rows) == "| function | why |\n| --- | --- |\n| &lt;lambda&gt; | a &#124; b c |"
