"""The result of a comparison: a figure, a table for a terminal and in Markdown, and sentences."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from rich.table import Table

from gradtrail.core.intervals import SIGNIFICANCE
from gradtrail.experiments.sweep.runs import CompletedRun
from gradtrail.experiments.sweep.stats import NOT_SIGNIFICANT, SIGNIFICANT, Summary
from gradtrail.stages.artifacts import plotting
from gradtrail.support.significance import Difference
from gradtrail.support.tables import table

_COLOURS = {"baseline": plotting.GREY, SIGNIFICANT: plotting.VERMILLION}  # every other verdict: blue
_SPREAD = 0.14  # half the width of the points of a variant
_OFFSET = 0.16  # shift of the points to the left, and of the mean to the right
_INCHES_PER_VARIANT = 1.3
_MAX_SIDE_BY_SIDE = 4  # largest number of variants with panels side by side
_MAX_SENTENCES = 2  # with more variants, the answer groups them by verdict


def draw_comparison(path: Path, summaries: Sequence[Summary], title: str) -> None:
    """Draw the accuracies and, if any run was timed, the training times.

    Args:
        path: File of the PNG.
        summaries: Variants, the baseline first.
        title: Title of the figure.
    """
    are_timed = any(summary.seconds is not None for summary in summaries)
    num_panels, is_wide = (2 if are_timed else 1), len(summaries) > _MAX_SIDE_BY_SIDE
    rows, columns = (num_panels, 1) if is_wide else (1, num_panels)
    width = columns * max(4.4, 1.2 + _INCHES_PER_VARIANT * len(summaries))
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
    """Draw runs as points, runs of a seed joined by a line, and the mean of each variant.

    The baseline's mean is a horizontal line. The mean of another variant is drawn at the baseline's mean plus the
    difference over the common seeds, with the interval of the difference as its bar: if the bar does not reach the
    line, the difference is significant.
    """
    _join_seeds(axis, summaries)
    baseline = next((summary.mean for summary in summaries if summary.is_baseline), math.nan)
    for place, summary in enumerate(summaries):
        colour = _colour(summary)
        values = [100 * accuracy for accuracy in summary.accuracies]
        axis.plot(_places(place - _OFFSET, summary), values, "o", color=colour, alpha=0.55, markersize=5)
        style: Any = {"fmt": "D", "color": colour, "markersize": 6, "capsize": 5, "elinewidth": 1.6}
        mean = baseline + summary.difference.mean if summary.difference else summary.mean
        axis.errorbar(place + _OFFSET, 100 * mean, _half_interval(summary.difference), **style)
        if summary.is_baseline:
            axis.axhline(100 * summary.mean, color=colour, linestyle="--", linewidth=1)
    axis.set(title="test accuracy, %")
    axis.margins(y=0.12)
    axis.yaxis.set_major_formatter("{x:.2f}")


def _half_interval(difference: Difference | None) -> float | None:
    """Return half the width of a difference's interval, in points; None without an interval."""
    return 100 * (difference.mean - difference.low) if difference and difference.has_interval else None


def _join_seeds(axis: Axes, summaries: Sequence[Summary]) -> None:
    """Draw a line through the runs of each seed."""
    seeds = sorted({run.planned.seed for summary in summaries for run in summary.runs})
    for seed in seeds:
        points = [
            (x, 100 * run.accuracy)
            for place, summary in enumerate(summaries)
            for x, run in zip(_places(place - _OFFSET, summary), summary.runs, strict=True)
            if run.planned.seed == seed
        ]
        axis.plot(*zip(*points, strict=True), color=plotting.GREY, alpha=0.25, linewidth=1)


def _draw_seconds(axis: Axes, summaries: Sequence[Summary]) -> None:
    """Draw the median time as a bar, and each run as a point."""
    for place, summary in enumerate(summaries):
        if summary.seconds is None:
            continue
        colour = _colour(summary)
        axis.bar(place, summary.seconds, 0.6, color=colour, alpha=0.35)
        timed = [(x, run.seconds) for x, run in zip(_places(place, summary), summary.runs, strict=True)]
        measured = [(x, seconds) for x, seconds in timed if seconds is not None]
        axis.plot(*zip(*measured, strict=True), "o", color=colour, markersize=5)
        text = f"{summary.seconds:.1f} s" + (f"\n× {ratio}" if (ratio := _time_ratio(summary)) else "")
        highest = max(seconds for _, seconds in measured)
        axis.annotate(text, (place, highest), (0, 6), textcoords="offset points", ha="center", fontsize=9)
    longest = max(run.seconds or 0 for summary in summaries for run in summary.runs)
    title = "training, seconds (median and runs)" + ("\nnot all comparable" if times_note(summaries) else "")
    axis.set(title=title, ylim=(0, 1.2 * longest))


def _places(place: float, summary: Summary) -> list[float]:
    """Return the x positions of the runs of a variant, side by side around `place`."""
    count = len(summary.runs)
    return [place + _SPREAD * (2 * number / (count - 1) - 1) if count > 1 else place for number in range(count)]


def _colour(summary: Summary) -> str:
    return _COLOURS.get(summary.verdict, plotting.BLUE)


def _legend(summaries: Sequence[Summary]) -> list[Line2D]:
    verdicts = {summary.verdict: _colour(summary) for summary in summaries}
    marks = [Line2D([], [], marker="D", linestyle="", color=colour, label=name) for name, colour in verdicts.items()]
    run = Line2D(
        [], [], marker="o", linestyle="-", color=plotting.GREY, alpha=0.5, label="a run; lines join those of a seed"
    )
    label = "mean; bar: simultaneous 95 % interval of the difference"
    mean = Line2D([], [], marker="D", linestyle="-", color=plotting.GREY, label=label)
    return [*marks, mean, run]


def as_table(summaries: Sequence[Summary], title: str) -> Table:
    """Return the variants as a table for a terminal."""
    rows = _rows(summaries)
    return table(title, rows, right=[*rows[0]][1:])


def as_markdown(summaries: Sequence[Summary], question: str, caption: str) -> str:
    """Return the question, the table and the answer in Markdown."""
    cells_by_column = _rows(summaries)
    columns = [*cells_by_column[0]]
    rows = [columns, ["---"] * len(columns), *([*cells.values()] for cells in cells_by_column)]
    lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for cells in rows]
    return "\n".join([question, "", *lines, "", answer(summaries), "", caption, ""])


def as_frame(runs: Sequence[CompletedRun]) -> pd.DataFrame:
    """Return a table with one row per run."""
    return pd.DataFrame(
        [
            {
                "variant": run.planned.label,
                "seed": run.planned.seed,
                "test_accuracy": run.accuracy,
                "test_accuracy_corrected_labels": run.accuracy_corrected,
                "test_loss": run.loss,
                "train_seconds": run.seconds,
                "compile_seconds": run.compile_seconds,
                "began": run.began,
                "ended": run.ended,
                "machine": run.machine,
                "dataset": run.dataset,
                "mlflow_run": run.run_id,
            }
            for run in runs
        ]
    )


def answer(summaries: Sequence[Summary]) -> str:
    """Return the answer to the question of a comparison, as sentences."""
    baseline = next((summary for summary in summaries if summary.is_baseline), None)
    variants = [summary for summary in summaries if not summary.is_baseline]
    if baseline is None or not variants:
        return "There is nothing to compare yet."
    if len(variants) <= _MAX_SENTENCES:
        return " ".join(_sentence(summary, baseline) for summary in variants)
    parts = [
        f"{verdict}: {', '.join(_briefly(summary) for summary in variants if summary.verdict == verdict)}"
        for verdict in _verdicts(variants)
    ]
    return f"Compared with {baseline.label}, in points of test accuracy: {'; '.join(parts)}."


def _sentence(summary: Summary, baseline: Summary) -> str:
    if summary.difference is None:
        return f"{summary.label} and {baseline.label} have no seed in common."
    differs = f"{summary.label} differs from {baseline.label} by {_points(summary.difference.mean)} points"
    return f"{differs}{_interval(summary.difference)}: {summary.verdict}{_pace(summary.log_time_ratio)}."


def _pace(log_time_ratio: Difference | None) -> str:
    """Return how fast a variant trains; empty if unknown."""
    if log_time_ratio is None or not log_time_ratio.has_interval:
        return ""
    if not log_time_ratio.is_significant:
        return "; its training time does not differ significantly"
    mean, low, high = (math.exp(-end) for end in (log_time_ratio.mean, log_time_ratio.high, log_time_ratio.low))
    return f"; it trains {mean:.2f} × as fast ({low:.2f} to {high:.2f})"


def times_note(summaries: Sequence[Summary]) -> str:
    """Return why some times are not compared with the baseline's; empty if all are, or if none was measured."""
    timed = [summary for summary in summaries if summary.seconds is not None and not summary.is_baseline]
    unknown = [summary.label for summary in timed if not _time_ratio(summary)]
    if not unknown:
        return ""
    machines = sorted({run.machine for summary in summaries for run in summary.runs if run.machine})
    several = (
        f" The runs are from {len(machines)} kinds of machine: {', '.join(machines)}." if len(machines) > 1 else ""
    )
    return (
        f"The training times of {', '.join(unknown)} are not comparable with those of the baseline: a ratio needs two "
        "seeds that both trained on the same kind of machine, one run at a time, and within an hour without another "
        f"seed in between.{several}"
    )


def _briefly(summary: Summary) -> str:
    return f"{summary.label} ({_points(summary.difference.mean)})" if summary.difference else summary.label


def _verdicts(summaries: Sequence[Summary]) -> list[str]:
    """Return the verdicts of the variants, the definite ones first."""
    return sorted(
        {summary.verdict for summary in summaries},
        key=lambda verdict: (verdict != SIGNIFICANT, verdict != NOT_SIGNIFICANT),
    )


def _rows(summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """Return the cells of each variant, column → text."""
    columns = _columns(summaries)
    return [{column: cell(summary) for column, cell in columns.items()} for summary in summaries]


def _columns(summaries: Sequence[Summary]) -> dict[str, Callable[[Summary], str]]:
    """Return the columns, title → function of a variant; corrected labels and times only if a run has them."""
    columns = dict(_COLUMNS)
    if any(map(_corrected, summaries)):
        columns |= {"corrected labels, %": lambda summary: _mean_and_spread(_corrected(summary))}
    if any(summary.seconds is not None for summary in summaries):
        columns |= {"training, s": lambda summary: _number(summary.seconds, ".1f")}
    if any(_time_ratio(summary) for summary in summaries):
        columns |= {"× baseline": _time_ratio}
    if any(summary.compile_seconds is not None for summary in summaries):
        columns |= {"compile, s": lambda summary: _number(summary.compile_seconds, ".1f")}
    return columns


def _corrected(summary: Summary) -> list[float]:
    """Return the accuracies with corrected test labels, of the runs that have them."""
    return [run.accuracy_corrected for run in summary.runs if run.accuracy_corrected is not None]


def _mean_and_spread(accuracies: Sequence[float]) -> str:
    if not accuracies:
        return ""
    spread = f" ± {100 * statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    return f"{100 * statistics.mean(accuracies):.2f}{spread}"


def _difference(summary: Summary) -> str:
    return f"{_points(summary.difference.mean)}{_interval(summary.difference)}" if summary.difference else ""


def _interval(difference: Difference) -> str:
    return f" ({_end(difference.low)} to {_end(difference.high)})" if difference.has_interval else ""


def _points(share: float) -> str:
    """Format a difference of fractions in percentage points, with its sign."""
    text = f"{100 * share:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def _end(share: float) -> str:
    """Format an end of an interval, with enough digits to show its sign."""
    text = _points(share)
    return f"{100 * share:+.1g}".replace("-", "−") if text == "0.00" and share else text


def _time_ratio(summary: Summary) -> str:
    """Return the ratio of the training times to the baseline's and its interval; empty if unknown."""
    ratio = summary.log_time_ratio
    if ratio is None or not ratio.has_interval:
        return ""
    return f"{math.exp(ratio.mean):.2f} ({math.exp(ratio.low):.2f} to {math.exp(ratio.high):.2f})"


def _p_value(p_value: float) -> str:
    """Format a p value with enough digits to show whether it is below the level."""
    if math.isnan(p_value):
        return ""
    if p_value < 0.001:
        return "< 0.001"
    text = f"{p_value:.3f}"
    return text if float(text) != SIGNIFICANCE else "< 0.05" if p_value < SIGNIFICANCE else "≥ 0.05"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "variant": lambda summary: summary.label,
    "seeds": lambda summary: ", ".join(str(run.planned.seed) for run in summary.runs),
    "test accuracy, %": lambda summary: _mean_and_spread(summary.accuracies),
    "difference, points": _difference,
    "p": lambda summary: _p_value(summary.difference.p_value) if summary.difference else "",
    "verdict": lambda summary: summary.verdict,
    "test loss": lambda summary: f"{summary.loss:.4f}",
}
