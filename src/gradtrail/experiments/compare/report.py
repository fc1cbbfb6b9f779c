"""The result of a comparison: a table for a terminal and in Markdown, and a figure."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradtrail.experiments.compare.statistics import SIGNIFICANT, Summary, median
from gradtrail.support.progress import stdout_console
from gradtrail.support.significance import Difference
from gradtrail.support.tables import TextTable, markdown_table

_CAPTION = (
    "Test accuracy: mean ± standard deviation over the seeds. Difference to the baseline over the seeds that both "
    "have, with its simultaneous 95 % confidence interval (paired t-test, Bonferroni); significant: the interval "
    "excludes 0. Training times are medians; × baseline: geometric mean of the ratios, with its simultaneous 95 % "
    "confidence interval, if at least two seeds have comparable times: both trained on the same kind of "
    "machine, one run at a time, within an hour and without another seed in between."
)
_OFFSET = 0.15  # distance of the points, and of the mean, from the middle of a variant's row


def table_rows(summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """Return the cells of each variant, column → text, without the columns that no variant fills."""
    is_tested = any(summary.difference and summary.difference.num_pairs > 1 for summary in summaries)
    has_sizes = len({summary.runs[0].num_parameters for summary in summaries}) > 1
    rows = []
    for summary in summaries:
        balanced = [run.test_balanced_accuracy for run in summary.runs]
        costs = [run.cost for run in summary.runs if run.cost is not None]
        corrected = [run.test_accuracy_corrected_labels for run in summary.runs]
        cells = {
            "variant": summary.variant,
            "parameters": _number(summary.runs[0].num_parameters if has_sizes else None, ",.0f"),
            "seeds": ", ".join(str(run.seed) for run in summary.runs),
            "test accuracy, %": _mean_and_spread(summary.accuracies),
            "difference, points": _difference(summary.difference),
            "verdict": summary.verdict if is_tested else "",
            "balanced accuracy, %": _mean_and_spread([share for share in balanced if share is not None]),
            "test loss": f"{statistics.mean(run.test_loss for run in summary.runs):.4f}",
            "corrected labels, %": _mean_and_spread([share for share in corrected if share is not None]),
            "training, s": _number(summary.seconds, ".1f"),
            "× baseline": _time_ratio(summary.log_time_ratio),
            "compile, s": _number(median(run.compile_seconds for run in summary.runs), ".1f"),
            "cost": _number(sum(costs) if costs else None, ".3g"),
        }
        rows.append(cells)
    return [{column: row[column] for column in rows[0] if any(other[column] for other in rows)} for row in rows]


def print_table(summaries: Sequence[Summary], title: str) -> None:
    """Print the table on a terminal, with a caption if variants are compared."""
    rows, console = table_rows(summaries), stdout_console()
    console.print(TextTable(title, rows, right=[*rows[0]][1:]))
    if _is_compared(summaries):
        console.print(_CAPTION, style="dim")


def as_markdown(summaries: Sequence[Summary], title: str) -> str:
    """Return a title, the table and a caption in Markdown."""
    text = markdown_table(table_rows(summaries))
    return "\n\n".join([f"**{title}**", text, *([_CAPTION] if _is_compared(summaries) else [])]) + "\n"


def draw_comparison(path: Path, summaries: Sequence[Summary], title: str) -> None:
    """Draw the accuracies and, if any run was timed, the training times, with a row per variant.

    Points are runs. The baseline's mean is a vertical line. The mean of another variant is drawn at the baseline's mean
    plus the difference over the common seeds, with the interval of the difference as its bar: if the bar does not reach
    the line, the difference is significant.
    """
    from gradtrail.stages.common import plotting  # late: matplotlib takes long to import

    columns = 2 if any(summary.seconds is not None for summary in summaries) else 1
    size = (5.5 * columns, 1.8 + 0.45 * len(summaries))
    figure, axes = plotting.new_figure(title, columns=columns, size=size)
    accuracy, seconds = axes[0, 0], axes[0, -1]
    colours = {"baseline": plotting.GREY, SIGNIFICANT: plotting.VERMILLION}
    baseline = next((summary.mean for summary in summaries if summary.is_baseline), 0.0)
    for row, summary in enumerate(summaries):
        colour = colours.get(summary.verdict, plotting.BLUE)

        # Accuracies
        points = [100 * share for share in summary.accuracies]
        accuracy.plot(points, [row - _OFFSET] * len(points), "o", color=colour, alpha=0.55, markersize=5)
        mean, half_width, difference = summary.mean, None, summary.difference
        if difference and difference.has_interval:
            mean, half_width = baseline + difference.mean, 100 * (difference.mean - difference.low)
        style: Any = {"fmt": "D", "color": colour, "markersize": 6, "capsize": 5, "label": summary.verdict}
        accuracy.errorbar(100 * mean, row + _OFFSET, xerr=half_width, **style)
        if summary.is_baseline:
            accuracy.axvline(100 * mean, color=colour, linestyle="--", linewidth=1)

        # Times
        if summary.seconds is not None:
            seconds.barh(row, summary.seconds, 0.6, color=colour, alpha=0.35)
            ratio = _time_ratio(summary.log_time_ratio)
            text = f"{summary.seconds:.1f} s{f', × {ratio}' if ratio else ''}"
            times = [run.train_seconds for run in summary.runs if run.train_seconds is not None]
            seconds.plot(times, [row] * len(times), "o", color=colour, markersize=4)
            right = max(summary.seconds, *times), row  # of the bar and of its points
            seconds.annotate(text, right, (8, 0), textcoords="offset points", va="center", fontsize=9)
    for axis in axes.flat:
        axis.set_yticks(range(len(summaries)), labels=[summary.variant for summary in summaries])
        axis.set_ylim(len(summaries) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")
    if columns == 2:
        seconds.set(title="training, s: median and runs", yticklabels=[])
        seconds.margins(x=0.8)
    accuracy.set(title="test accuracy, %: runs and mean")
    if _is_compared(summaries):
        handles, labels = accuracy.get_legend_handles_labels()
        verdicts = dict(zip(labels, handles, strict=True))
        legend_title = "bar: simultaneous 95 % interval of the difference"
        figure.legend(
            verdicts.values(), verdicts.keys(), loc="outside lower center", ncols=4, fontsize=9, title=legend_title
        )
    plotting.save(figure, path)


def _is_compared(summaries: Sequence[Summary]) -> bool:
    return any(summary.difference for summary in summaries)


def _mean_and_spread(shares: Sequence[float]) -> str:
    if not shares:
        return ""
    spread = f" ± {100 * statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * statistics.mean(shares):.2f}{spread}"


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return ""
    ends = f" ({_end(difference.low)} to {_end(difference.high)})" if difference.has_interval else ""
    return f"{_points(difference.mean)}{ends}"


def _points(share: float) -> str:
    """Format a difference of fractions in percentage points, with its sign."""
    text = f"{100 * share:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def _end(share: float) -> str:
    """Format an end of an interval, with enough digits to show its sign."""
    text = _points(share)
    return f"{100 * share:+.1g}".replace("-", "−") if text == "0.00" and share else text


def _time_ratio(log_ratio: Difference | None) -> str:
    """Return the ratio of the training times to the baseline's and its interval; empty if unknown."""
    if log_ratio is None or not log_ratio.has_interval:
        return ""
    return f"{math.exp(log_ratio.mean):.2f} ({math.exp(log_ratio.low):.2f} to {math.exp(log_ratio.high):.2f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
