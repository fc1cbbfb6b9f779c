"""The picture of a comparison: the accuracy of every seed by variant, and what the training took."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gradtrail.io.comparison_summary import MORE, Summary
from gradtrail.io.figures import style

_COLOURS = {"baseline": style.GREY, MORE: style.VERMILLION}  # every other verdict: blue
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
    figure, axes = style.new_figure(title, rows=rows, columns=columns, size=(width, 0.8 + 4 * rows))
    _draw_accuracies(axes[0, 0], summaries)
    if are_timed:
        _draw_seconds(axes[-1, -1], summaries)
    for axis in axes.flat:
        axis.set_xticks(range(len(summaries)), labels=[summary.label for summary in summaries])
        axis.set_xlim(-0.5, len(summaries) - 0.5)
        axis.grid(visible=False, axis="x")
    figure.legend(handles=_legend(summaries), loc="outside lower center", ncols=3, fontsize=9)
    style.save(figure, path)


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
        axis.plot(*zip(*points, strict=True), color=style.GREY, alpha=0.25, linewidth=1)


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
    return _COLOURS.get(summary.verdict, style.BLUE)


def _legend(summaries: Sequence[Summary]) -> list[Line2D]:
    verdicts = {summary.verdict: _colour(summary) for summary in summaries}
    marks = [Line2D([], [], marker="D", linestyle="", color=colour, label=name) for name, colour in verdicts.items()]
    run = Line2D([], [], marker="o", linestyle="-", color=style.GREY, alpha=0.5, label="a run; lines join a seed's")
    mean = Line2D(
        [], [], marker="D", linestyle="-", color=style.GREY, label="mean; bar: 95 % interval of the difference"
    )
    return [*marks, mean, run]
