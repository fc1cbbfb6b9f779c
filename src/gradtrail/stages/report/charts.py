"""Line charts for the SVG of the page: places and ticks, with equal bytes for equal values."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from gradtrail.stages.report.numbers import Row, Sources

WIDTH, HEIGHT = 440, 236
LEFT, RIGHT, TOP, BOTTOM = 46, WIDTH - 12, 10, HEIGHT - 38  # edges of the plot
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart."""

    name: str
    style: str  # class in the style sheet, which gives it its colour
    points: Sequence[Point]  # finite, and positive on a logarithmic axis
    band: Sequence[tuple[float, float, float]] = ()  # (x, low, high) of an area around the line, clipped to the axis


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with one x axis; its y axis starts at 0 or is logarithmic."""

    series: Sequence[Series]
    stops: Sequence[tuple[float, Sequence[str]]]  # x, and the lines of text that the reader gets when pointing at it
    unit: str = ""  # unit after the numbers of the y axis
    log: bool = False  # True for a logarithmic y axis
    square: bool = False  # True if both axes go from 0 to 1, with a diagonal
    bars: Sequence[Point] = ()  # (x, height as a share of the plot) of bars behind the lines
    bar_width: float = 0.0  # width in units of the x axis

    @cached_property
    def x_range(self) -> Point:
        """First and last value of the x axis."""
        values = [x for series in self.series for x, _ in series.points]
        low, high = (0.0, 1.0) if self.square or not values else (min(values), max(values))
        return (low, high) if high > low else (low - 1, high + 1)

    @cached_property
    def y_range(self) -> Point:
        """Lowest and highest value of the y axis, which has a margin around the lines."""
        values = [y for series in self.series for _, y in series.points]
        if self.square or not values:
            return 0.0, 1.0
        if self.log:
            return min(values) / 1.25, max(values) * 1.25
        return 0.0, 1.05 * max(values) or 1.0

    def x(self, value: float) -> float:
        """Return the place of a value of the x axis."""
        low, high = self.x_range
        return round(LEFT + (value - low) / (high - low) * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        """Return the place of a value of the y axis; one beyond its ends is moved to the nearer one."""
        low, high = self.y_range
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)

    @property
    def x_ticks(self) -> list[float]:
        """Numbers of the x axis."""
        return linear_ticks(*self.x_range, 8, whole=not self.square)

    @property
    def y_ticks(self) -> list[float]:
        """Numbers of the y axis."""
        return log_ticks(*self.y_range) if self.log else linear_ticks(*self.y_range, 5)

    @cached_property
    def strips(self) -> list[Point]:
        """Left end and width of the strip of the plot that belongs to each stop."""
        places = [self.x(x) for x, _ in self.stops]
        middles = [(left + right) / 2 for left, right in itertools.pairwise(places)]
        edges = itertools.pairwise([LEFT, *middles, RIGHT])
        return [(round(left, 1), round(right - left, 1)) for left, right in edges]


def linear_ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`, evenly spaced; `whole` for integers alone."""
    power = 10 ** math.floor(math.log10((high - low) / most))
    steps = [step * scale for scale in (power, 10 * power) for step in _ROUND]
    fitting = [step for step in steps if (high - low) / step < most and (not whole or step == int(step))]
    step = min(fitting, default=1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5 times a power of ten from `low` to `high`; only the powers if those are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return ticks if len(ticks) <= 6 else [tick for tick in ticks if f"{tick:e}".startswith("1")]


def make_charts(sources: Sources) -> dict[str, Chart]:
    """Return the charts of the page by name."""
    epochs = sources.table("train/epochs")
    losses = [("validation", "validation", "validation_loss")]  # (name, style, column) of each line
    errors = [("validation", "validation", "validation_accuracy")]
    if not sources.is_redacted:
        errors.insert(0, ("training", "train", "accuracy"))
        if sources.has_other_loss:
            losses.insert(0, ("training (minimized loss)", "smoothed", "loss"))
            losses.insert(0, ("training (cross-entropy)", "train", "cross_entropy"))
        else:
            losses.insert(0, ("training", "train", "cross_entropy"))

    in_percent = [
        row | {column: 100 * (1 - value) for column, value in row.items() if "accuracy" in str(column)}
        for row in epochs
    ]
    is_never_zero = all(row[column] > 0 for row in in_percent for _, _, column in errors)
    charts = {
        "loss": epoch_chart(epochs, losses, ".4f"),
        "error": epoch_chart(in_percent, errors, ".2f", unit="%", log=is_never_zero),
        "calibration": calibration_chart(sources),
    }
    if sources.guarantee:
        name = "epsilon of one network" if sources.guarantee.members > 1 else "epsilon by PLD"
        charts["epsilon"] = epoch_chart(epochs, [(name, "model", "epsilon")], ".4g")
    return charts


def epoch_chart(
    epochs: list[Row], lines: list[tuple[str, str, str]], form: str, *, unit: str = "", log: bool = False
) -> Chart:
    """Return a chart of columns by epoch; the mean over several members of a validation metric has its interval."""

    def line(name: str, style: str, column: str) -> Series:
        has_band = style == "validation"
        banded = [row for row in epochs if has_band and math.isfinite(row.get(f"{column}_low", math.nan))]
        return Series(
            name=name,
            style=style,
            points=[(row["epoch"], row[column]) for row in epochs if math.isfinite(row[column])],
            band=[(row["epoch"], row[f"{column}_low"], row[f"{column}_high"]) for row in banded],
        )

    texts = [[f"{name}: {row[column]:{form}}{unit}" for name, _, column in lines] for row in epochs]
    return Chart(
        series=[line(*description) for description in lines],
        stops=[(row["epoch"], [f"epoch {row['epoch']}", *text]) for row, text in zip(epochs, texts, strict=True)],
        unit=unit,
        log=log,
    )


def calibration_chart(sources: Sources) -> Chart:
    """Return the reliability diagram: accuracy over confidence, with the number of examples of each bin as bars."""
    calibrated = sources.table("evaluate/calibration")
    uncalibrated = sources.table("evaluate/calibration_uncalibrated")
    num_bins = sources.params["evaluate"]["calibration_bins"]
    most = max(row["count"] for row in calibrated)

    def line(name: str, style: str, rows: list[Row]) -> Series:
        return Series(name=name, style=style, points=[(row["confidence"], row["accuracy"]) for row in rows])

    def stop(name: str, row: Row) -> tuple[float, list[str]]:
        confidence, accuracy = f"confidence: {row['confidence']:.1%}", f"accuracy: {row['accuracy']:.1%}"
        return row["confidence"], [name, confidence, accuracy, f"examples: {row['count']:,}"]

    def bar(row: Row) -> Point:
        """Return the centre of a bin and a height on a logarithmic scale, on which the highest is 30 %."""
        index = min(math.floor(row["confidence"] * num_bins), num_bins - 1)
        return (index + 0.5) / num_bins, 0.3 * math.log1p(row["count"]) / math.log1p(most)

    stops = [stop("calibrated", row) for row in calibrated] + [stop("uncalibrated", row) for row in uncalibrated]
    return Chart(
        series=[line("calibrated", "model", calibrated), line("uncalibrated", "uncalibrated", uncalibrated)],
        stops=sorted(stops),
        square=True,
        bars=[bar(row) for row in calibrated],
        bar_width=0.9 / num_bins,
    )
