"""The picture of a comparison: the accuracy of every seed by variant, and what the training took.

What a comparison came to, for a person to read: a table for a terminal and for a README, the answer in words.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gradtrail.experiments.sweep.runs import CompletedRun
from gradtrail.experiments.sweep.stats import MORE, NO_MORE, Summary
from gradtrail.stages.artifacts import plotting

_COLOURS = {"baseline": plotting.GREY, MORE: plotting.VERMILLION}  # every other verdict: blue
_SPREAD = 0.14  # of the points of a variant, either way
_ASIDE = 0.16  # by which the points stand at the left, and the mean at the right
_INCHES_A_VARIANT = 1.3
_MOST_BESIDE = 4


def draw_comparison(path: Path, summaries: Sequence[Summary], title: str) -> None:
    """Draw accuracies, and seconds of training where any were timed: side by side, or below where variants are many.

    Args:
        path: of the PNG.
        summaries: of the variants, the baseline first.
        title: the comparison and the data set.
    """
    are_timed = any(summary.seconds is not None for summary in summaries)
    num_panels, are_many = (2 if are_timed else 1), len(summaries) > _MOST_BESIDE
    rows, columns = (num_panels, 1) if are_many else (1, num_panels)
    width = columns * max(4.4, 1.2 + _INCHES_A_VARIANT * len(summaries))
    figure, axes = plotting.new_figure(title, rows=rows, columns=columns, size=(width, 0.8 + 4 * rows))
    _draw_accuracies(axes[0, 0], summaries)
    if are_timed:
        _draw_seconds(axes[-1, -1], summaries)
    for axis in axes.flat:
        axis.set_xticks(range(len(summaries)), labels=[summary.label for summary in summaries])
        axis.set_xlim(-0.5, len(summaries) - 0.5)
        axis.grid(visible=False, axis="x")
    figure.legend(handles=_legend(summaries), loc="outside lower center", ncols=3, fontsize=9)
    plotting.save(figure, path)


def _draw_accuracies(axis: Axes, summaries: Sequence[Summary]) -> None:
    """Draw each run as a point, those of one seed joined by a line, and each variant's mean.

    The bar at a mean is the interval of its difference to the baseline, which is drawn as a line across: where the bar
    does not reach the line, the difference is more than chance, but for the adjustment to many variants.
    """
    _join_seeds(axis, summaries)
    for place, summary in enumerate(summaries):
        colour = _colour(summary)
        values = [100 * accuracy for accuracy in summary.accuracies]
        axis.plot(_places(place - _ASIDE, summary), values, "o", color=colour, alpha=0.55, markersize=5)
        look: Any = {"fmt": "D", "color": colour, "markersize": 6, "capsize": 5, "elinewidth": 1.6}
        axis.errorbar(place + _ASIDE, 100 * summary.mean, _half(summary), **look)
        if summary.is_baseline:
            axis.axhline(100 * summary.mean, color=colour, linestyle="--", linewidth=1)
    axis.set(title="test accuracy, %")
    axis.margins(y=0.12)
    axis.yaxis.set_major_formatter("{x:.2f}")


def _half(summary: Summary) -> float | None:
    """Return half the interval of a difference in points, where it is known."""
    difference = summary.difference
    return None if difference is None or math.isnan(difference.low) else 100 * (difference.mean - difference.low)


def _join_seeds(axis: Axes, summaries: Sequence[Summary]) -> None:
    seeds = sorted({made.run.seed for summary in summaries for made in summary.runs})
    for seed in seeds:
        points = [
            (x, 100 * made.accuracy)
            for place, summary in enumerate(summaries)
            for x, made in zip(_places(place - _ASIDE, summary), summary.runs, strict=True)
            if made.run.seed == seed
        ]
        axis.plot(*zip(*points, strict=True), color=plotting.GREY, alpha=0.25, linewidth=1)


def _draw_seconds(axis: Axes, summaries: Sequence[Summary]) -> None:
    """Draw the median time as a bar, and each run as a point."""
    for place, summary in enumerate(summaries):
        if summary.seconds is None:
            continue
        colour = _colour(summary)
        axis.bar(place, summary.seconds, 0.6, color=colour, alpha=0.35)
        timed = [(x, made.seconds) for x, made in zip(_places(place, summary), summary.runs, strict=True)]
        known = [(x, seconds) for x, seconds in timed if seconds is not None]
        axis.plot(*zip(*known, strict=True), "o", color=colour, markersize=5)
        known_ratio = summary.time_ratio is not None and not summary.is_baseline
        text = f"{summary.seconds:.1f} s" + (f"\n× {summary.time_ratio:.2f}" if known_ratio else "")
        highest = max(seconds for _, seconds in known)
        axis.annotate(text, (place, highest), (0, 6), textcoords="offset points", ha="center", fontsize=9)
    longest = max(made.seconds or 0 for summary in summaries for made in summary.runs)
    axis.set(title="training, seconds (median and runs)", ylim=(0, 1.2 * longest))


def _places(place: float, summary: Summary) -> list[float]:
    """Return where the runs of a variant stand, side by side."""
    count = len(summary.runs)
    return [place + _SPREAD * (2 * number / (count - 1) - 1) if count > 1 else place for number in range(count)]


def _colour(summary: Summary) -> str:
    return _COLOURS.get(summary.verdict, plotting.BLUE)


def _legend(summaries: Sequence[Summary]) -> list[Line2D]:
    verdicts = {summary.verdict: _colour(summary) for summary in summaries}
    marks = [Line2D([], [], marker="D", linestyle="", color=colour, label=name) for name, colour in verdicts.items()]
    run = Line2D([], [], marker="o", linestyle="-", color=plotting.GREY, alpha=0.5, label="a run; lines join a seed's")
    mean = Line2D(
        [], [], marker="D", linestyle="-", color=plotting.GREY, label="mean; bar: 95 % interval of the difference"
    )
    return [*marks, mean, run]


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


def as_frame(runs: Sequence[CompletedRun]) -> pd.DataFrame:
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
