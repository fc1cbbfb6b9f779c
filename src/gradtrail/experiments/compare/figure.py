"""The figure of a comparison. It is a module of its own because matplotlib takes long to import."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradtrail.experiments.compare.report import time_ratio
from gradtrail.experiments.compare.statistics import SIGNIFICANT, Summary
from gradtrail.stages.artifacts import plotting

_COLOURS = {"baseline": plotting.GREY, SIGNIFICANT: plotting.VERMILLION}  # every other verdict: blue
_OFFSET = 0.15  # distance of the points, and of the mean, from the middle of a variant's row


def draw_comparison(path: Path, summaries: Sequence[Summary], title: str) -> None:
    """Draw the accuracies and, if any run was timed, the training times, with a row per variant.

    Points are runs. The baseline's mean is a vertical line. The mean of another variant is drawn at the baseline's mean
    plus the difference over the common seeds, with the interval of the difference as its bar: if the bar does not reach
    the line, the difference is significant.
    """
    columns = 2 if any(summary.seconds is not None for summary in summaries) else 1
    size = (5.5 * columns, 1.8 + 0.45 * len(summaries))
    figure, axes = plotting.new_figure(title, columns=columns, size=size)
    accuracy, seconds = axes[0, 0], axes[0, -1]
    baseline = next((summary.mean for summary in summaries if summary.is_baseline), 0.0)
    for row, summary in enumerate(summaries):
        colour = _COLOURS.get(summary.verdict, plotting.BLUE)

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
            bar = seconds.barh(row, summary.seconds, 0.6, color=colour, alpha=0.35)
            ratio = time_ratio(summary.log_time_ratio)
            text = f"{summary.seconds:.1f} s{f', × {ratio}' if ratio else ''}"
            seconds.bar_label(bar, [text], padding=6, fontsize=9)
            times = [run.train_seconds for run in summary.runs if run.train_seconds is not None]
            seconds.plot(times, [row] * len(times), "o", color=colour, markersize=4)
    for axis in axes.flat:
        axis.set_yticks(range(len(summaries)), labels=[summary.variant for summary in summaries])
        axis.set_ylim(len(summaries) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")
    if columns == 2:
        seconds.set(title="training, s: median and runs", yticklabels=[])
        seconds.margins(x=0.8)
    accuracy.set(title="test accuracy, %: runs and mean")
    if summaries[0].is_compared:
        handles, labels = accuracy.get_legend_handles_labels()
        verdicts = dict(zip(labels, handles, strict=True))
        legend_title = "bar: simultaneous 95 % interval of the difference"
        figure.legend(
            verdicts.values(), verdicts.keys(), loc="outside lower center", ncols=4, fontsize=9, title=legend_title
        )
    plotting.save(figure, path)
