"""A comparison as tables of text, for a terminal and for a page, and as plain values."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gradtrail.experiments.diff.compare import Comparison, FunctionPair
from gradtrail.support.tables import table

_MOST_ROWS = 12  # rows of instructions or shapes per function
_COSTS = {
    "flops": "FLOPs",
    "bytes_accessed": "bytes",
    "temporary_bytes": "temporaries",
    "hlo_instructions": "instructions",
    "hlo_fusions": "fusions",
}
_DIGITS = 12  # digits of a digest


@dataclass(frozen=True)
class TextTable:
    """A table of text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    is_numeric: bool = False  # True if the columns after the first hold numbers, which are aligned right

    def for_terminal(self) -> Table:
        """Return the table in the form that the library rich prints."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return table(self.title, rows, right=self.columns[1:] if self.is_numeric else ())


def notes(comparison: Comparison) -> list[str]:
    """Return notes about missing artifacts of the runs."""
    return [note for side in (comparison.before, comparison.after) if (note := side.missing_note())]


def all_tables(comparison: Comparison) -> Iterator[TextTable]:
    """Yield the tables of a comparison that have rows."""
    yield from (
        TextTable(title, ("", "A", "B"), [(key, *pair) for key, pair in pairs.items()])
        for title, pairs in (
            ("Params", comparison.params),
            ("Machine, versions and switches", comparison.environment),
            ("Data", {key: (one[:_DIGITS], other[:_DIGITS]) for key, (one, other) in comparison.data.items()}),
        )
        if pairs
    )
    if comparison.code:
        yield TextTable("Code", ("changed",), [(path,) for path in comparison.code])
    if comparison.totals:
        yield _seconds(comparison)
    if comparison.functions:
        yield _functions(comparison)
    for pair in comparison.functions:
        yield from _instructions(pair)


def as_json(comparison: Comparison, cause: str) -> dict[str, Any]:
    """Return the comparison as plain values."""
    return {
        "cause": cause,
        "notes": notes(comparison),
        "runs": [
            {
                "run_id": side.run.info.run_id,
                "name": side.run.info.run_name,
                "attempt": side.attempt,
                "state": side.run.data.tags["state"],
                "machine": side.run.data.tags.get("machine"),
                "commit": side.commit,
                "seconds": side.seconds,
            }
            for side in (comparison.before, comparison.after)
        ],
        "params": comparison.params,
        "environment": comparison.environment,
        "data": comparison.data,
        "code": comparison.code,
        "functions": [
            {
                "function": pair.name,
                "verdict": pair.verdict,
                "before": dict(pair.before.numbers) if pair.before else None,
                "after": dict(pair.after.numbers) if pair.after else None,
                "cached": [function.cached if function else None for function in (pair.before, pair.after)],
                "instructions": [vars(change) for change in pair.changes],
                "shapes": [{"before": one, "after": other, "count": count} for one, other, count in pair.reshaped],
            }
            for pair in comparison.functions
        ],
    }


def _seconds(comparison: Comparison) -> TextTable:
    before, after = comparison.before.seconds, comparison.after.seconds
    rows = [(part, f"{before[part]:.1f}", f"{after[part]:.1f}", f"{comparison.seconds(part):+.1f}") for part in before]
    totals = sum(before.values()), sum(after.values())
    rows.append(("total", f"{totals[0]:.1f}", f"{totals[1]:.1f}", f"{totals[1] - totals[0]:+.1f}"))
    return TextTable("Where the seconds went", ("", "A", "B", "B − A"), rows, is_numeric=True)


def _functions(comparison: Comparison) -> TextTable:
    columns = ("function", "", *_COSTS.values(), "compile, s", "cached", "call, ms", "ratio")
    rows = []
    for pair in comparison.functions:
        costs = [_change(pair, key, _compact) for key in _COSTS]
        compiled = _change(pair, "compile_seconds", "{:.2f}".format)
        cached = " → ".join(dict.fromkeys(_cached(one.cached if one else None) for one in (pair.before, pair.after)))
        steady = _change(pair, "steady_call_seconds", lambda seconds: f"{1e3 * seconds:.3g}")
        ratio = pair.ratio("steady_call_seconds")
        ratio_text = "–" if ratio is None else f"{ratio:.2f} ×"
        rows.append((pair.name, pair.verdict, *costs, compiled, cached, steady, ratio_text))
    return TextTable("Compiled functions", columns, rows, is_numeric=True)


def _instructions(pair: FunctionPair) -> Iterator[TextTable]:
    if pair.changes:
        rows = [
            (f"{one.after - one.before:+d} {one.opcode}", one.line or "(made by XLA)", ", ".join(one.shapes))
            for one in pair.changes[:_MOST_ROWS]
        ]
        if more := len(pair.changes) - len(rows):
            rows.append((f"and {more} more", "", ""))
        yield TextTable(f"{pair.name}: instructions gained and lost", ("", "from", "shapes"), rows)
    elif pair.reshaped:
        rows = [(str(count), one, other) for one, other, count in pair.reshaped[:_MOST_ROWS]]
        yield TextTable(f"{pair.name}: the same instructions, of other shapes", ("", "A", "B"), rows)


def _change(pair: FunctionPair, key: str, form: Callable[[float], str]) -> str:
    """Return a number of both runs; only one if both have the same text."""
    texts = ["–" if number is None else form(number) for number in pair.numbers(key)]
    return " → ".join(dict.fromkeys(texts))


def _compact(number: float) -> str:
    """Return a count with three digits and a unit, such as `134 M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _cached(is_cached: bool | None) -> str:
    return "–" if is_cached is None else "yes" if is_cached else "no"
