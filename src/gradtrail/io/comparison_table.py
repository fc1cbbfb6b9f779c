"""What a comparison came to, for a person to read: a table for a terminal and for a README, the answer in words."""

import math
import statistics
from collections.abc import Callable, Sequence

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gradtrail.io.comparison_rows import MadeRun
from gradtrail.io.comparison_summary import MORE, NO_MORE, Summary

_MOST_SENTENCES = 2  # with more variants than that, the answer goes by verdict


def as_table(summaries: Sequence[Summary], title: str) -> Table:
    """Return the variants as a table for a terminal."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, name in enumerate(_columns(summaries)):
        table.add_column(name, justify="right" if place else "left")
    for cells in _rows(summaries):
        table.add_row(*cells)
    return table


def as_markdown(summaries: Sequence[Summary], question: str, caption: str) -> str:
    """Return question, table and answer for a README."""
    columns = list(_columns(summaries))
    rows = [columns, ["---"] * len(columns), *_rows(summaries)]
    lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for cells in rows]
    return "\n".join([question, "", *lines, "", answer(summaries), "", caption, ""])


def as_frame(runs: Sequence[MadeRun]) -> pd.DataFrame:
    """Return one line a run."""
    return pd.DataFrame(
        [
            {
                "variant": made.run.label,
                "seed": made.run.seed,
                "test_accuracy": made.accuracy,
                "test_loss": made.loss,
                "train_seconds": made.seconds,
                "compile_seconds": made.compile_seconds,
                "dataset": made.dataset,
                "mlflow_run": made.row,
            }
            for made in runs
        ]
    )


def answer(summaries: Sequence[Summary]) -> str:
    """Answer the question of a comparison in words."""
    baseline = next((summary for summary in summaries if summary.is_baseline), None)
    others = [summary for summary in summaries if not summary.is_baseline]
    if baseline is None or not others:
        return "There is nothing to compare yet."
    if len(others) <= _MOST_SENTENCES:
        return " ".join(_sentence(summary, baseline) for summary in others)
    groups = [(verdict, [each for each in others if each.verdict == verdict]) for verdict in _verdicts(others)]
    said = [f"{verdict}: {', '.join(_briefly(each) for each in group)}" for verdict, group in groups]
    return f"Beside {baseline.label}, in points of test accuracy: {'; '.join(said)}."


def _sentence(summary: Summary, baseline: Summary) -> str:
    difference = summary.difference
    if difference is None:
        return f"{summary.label} and {baseline.label} have no seed in common."
    interval = f" ({_points(difference.low)} to {_points(difference.high)})" if not math.isnan(difference.low) else ""
    differs = f"{summary.label} differs from {baseline.label} by {_points(difference.mean)} points{interval}"
    return f"{differs}: {summary.verdict}{_pace(summary)}."


def _pace(summary: Summary) -> str:
    if summary.time_ratio is None:
        return ""
    pace = f"{1 / summary.time_ratio:.1f}"
    return "; it trains as fast" if pace == "1.0" else f"; it trains {pace} × as fast"


def _briefly(summary: Summary) -> str:
    return f"{summary.label} ({_points(summary.difference.mean)})" if summary.difference else summary.label


def _verdicts(summaries: Sequence[Summary]) -> list[str]:
    """Return the verdicts that there are, what is certain first."""
    return sorted({summary.verdict for summary in summaries}, key=lambda verdict: (verdict != MORE, verdict != NO_MORE))


def _rows(summaries: Sequence[Summary]) -> list[list[str]]:
    return [[cell(summary) for cell in _columns(summaries).values()] for summary in summaries]


def _columns(summaries: Sequence[Summary]) -> dict[str, Callable[[Summary], str]]:
    """Return the columns, title → what a variant has there; times only where any were taken."""
    columns = dict(_COLUMNS)
    if any(summary.seconds is not None for summary in summaries):
        columns |= _TIMES
    if any(summary.compile_seconds is not None for summary in summaries):
        columns |= {"compile, s": lambda summary: _number(summary.compile_seconds, ".1f")}
    return columns


def _mean_and_spread(accuracies: Sequence[float]) -> str:
    spread = f" ± {100 * statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    return f"{100 * statistics.mean(accuracies):.2f}{spread}"


def _difference(summary: Summary) -> str:
    difference = summary.difference
    if difference is None:
        return ""
    known = not math.isnan(difference.low)
    interval = f" ({_points(difference.low)} to {_points(difference.high)})" if known else ""
    return f"{_points(difference.mean)}{interval}"


def _points(share: float) -> str:
    """Write a difference of shares in percentage points, with its sign."""
    text = f"{100 * share:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def _p_value(p_value: float) -> str:
    if math.isnan(p_value):
        return ""
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "variant": lambda summary: summary.label,
    "seeds": lambda summary: ", ".join(str(made.run.seed) for made in summary.runs),
    "test accuracy, %": lambda summary: _mean_and_spread(summary.accuracies),
    "difference, points": _difference,
    "p": lambda summary: _p_value(summary.p_value),
    "verdict": lambda summary: summary.verdict,
    "test loss": lambda summary: f"{summary.loss:.4f}",
}
_TIMES: dict[str, Callable[[Summary], str]] = {
    "training, s": lambda summary: _number(summary.seconds, ".1f"),
    "× baseline": lambda summary: _number(summary.time_ratio, ".2f"),
}
