"""Line charts as SVG, with equal bytes for equal values; the page has the values as text, for hovering."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

WIDTH, HEIGHT = 440, 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 38  # margins around the plot
_BARS = 0.3  # of the plot's height, for the tallest bar
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_DOTS = 60  # points of a line, above which they are not marked

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart.

    Attributes:
        band: (x, low, high) of an area around the line, clipped to the axis, whose range follows from the lines.
    """

    name: str
    style: str  # class in the style sheet, which gives it its colour
    points: Sequence[Point]  # (x, y); those that are not finite, or not positive on a logarithmic axis, are left out
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A place on the x axis that the reader can point at, with a line of text for each value there."""

    x: float
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark on an axis: its place in the drawing and its number."""

    place: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with one x axis.

    Attributes:
        bars: (x, height from 0 to 1) of bars behind the lines; `bar_width` is a share of the plot, `bars_name` their
            label.
    """

    id: str  # id of its figure on the page
    title: str
    alt: str  # the picture in words
    x_label: str
    series: Sequence[Series]
    stops: Sequence[Stop]
    unit: str = ""  # unit after the numbers of the y axis
    log: bool = False  # True if the y axis is logarithmic; a linear one starts at 0
    square: bool = False  # True if both axes go from 0 to 1, with a diagonal
    bars: Sequence[Point] = ()
    bar_width: float = 0.0
    bars_name: str = ""

    @cached_property
    def lines(self) -> list[tuple[Series, str, list[tuple[str, str]]]]:
        """Each series with the path of its line and the places of its dots."""
        drawn = []
        for series in self.series:
            places = [(self.across(x), self.down(y)) for x, y in series.points if self._is_drawn(x, y)]
            path = " ".join(f"{'L' if index else 'M'}{x} {y}" for index, (x, y) in enumerate(places))
            drawn.append((series, path, places if len(places) <= _DOTS else []))
        return drawn

    @cached_property
    def bands(self) -> list[tuple[Series, str]]:
        """Each series that has a band, with the path of its outline."""
        drawn = []
        for series in self.series:
            there = [(x, high) for x, _, high in series.band]
            back = [(x, low) for x, low, _ in reversed(series.band)]
            places = [f"{self.across(x)} {self.down(self._inside(y))}" for x, y in there + back]
            if places:
                drawn.append((series, f"M{' L'.join(places)}Z"))
        return drawn

    @cached_property
    def x_ticks(self) -> list[Tick]:
        """The numbers of the x axis."""
        low, high = self._x_range
        ticks = linear_ticks(low, high, 8, whole=not self.square)
        return [Tick(place=self.across(value), text=f"{value:g}") for value in ticks]

    @cached_property
    def y_ticks(self) -> list[Tick]:
        """The numbers of the y axis."""
        low, high = self._y_range
        ticks = log_ticks(low, high) if self.log else linear_ticks(low, high, 5)
        return [Tick(place=self.down(value), text=f"{value:g}{self.unit}") for value in ticks]

    @cached_property
    def hits(self) -> list[tuple[Stop, str, str, str]]:
        """Each stop with its place, and the left end and the width of the strip that belongs to it."""
        centres = [float(self.across(stop.x)) for stop in self.stops]
        middles = [(left + right) / 2 for left, right in itertools.pairwise(centres)]
        edges = [float(_LEFT), *middles, float(WIDTH - _RIGHT)] if centres else []
        strips = itertools.pairwise(edges)
        return [
            (stop, _number(centre), _number(left), _number(max(right - left, 0)))
            for stop, centre, (left, right) in zip(self.stops, centres, strips, strict=True)
        ]

    @cached_property
    def rectangles(self) -> list[tuple[str, str, str, str]]:
        """Each bar as (left, top, width, height)."""
        width = self.bar_width * (WIDTH - _LEFT - _RIGHT)
        floor = HEIGHT - _BOTTOM
        heights = [(float(self.across(x)), share * _BARS * (floor - _TOP)) for x, share in self.bars]
        return [
            (_number(x - width / 2), _number(floor - height), _number(width), _number(height)) for x, height in heights
        ]

    def across(self, value: float) -> str:
        """Return the place of a value of the x axis."""
        low, high = self._x_range
        return _number(_LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT))

    def down(self, value: float) -> str:
        """Return the place of a value of the y axis."""
        low, high = self._y_range
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return _number(HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM))

    @property
    def frame(self) -> tuple[int, int, int, int]:
        """Left, right, top and bottom of the plot."""
        return _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM

    @cached_property
    def _x_range(self) -> Point:
        if self.square:
            return 0.0, 1.0
        values = [x for series in self.series for x, y in series.points if self._is_drawn(x, y)] or [0.0]
        low, high = min(values), max(values)
        return (low, high) if high > low else (low - 1, high + 1)

    @cached_property
    def _y_range(self) -> Point:
        if self.square:
            return 0.0, 1.0
        values = [y for series in self.series for x, y in series.points if self._is_drawn(x, y)] or [1.0]
        low, high = min(values), max(values)
        if self.log:
            return low / 1.25, high * 1.25
        return min(low, 0.0), 1.05 * high if high > 0 else 1.0

    def _inside(self, value: float) -> float:
        low, high = self._y_range
        return min(max(value, low), high)

    def _is_drawn(self, x: float, y: float) -> bool:
        return math.isfinite(x) and math.isfinite(y) and (y > 0 or not self.log)


def linear_ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`, evenly spaced; `whole` for integers alone."""
    power = 10 ** math.floor(math.log10((high - low) / most))
    steps = [step * scale for scale in (power, 10 * power) for step in _STEPS]
    fitting = [step for step in steps if (high - low) / step < most and (not whole or step == int(step))]
    step = min(fitting, default=1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5 times a power of ten from `low` to `high`; only the powers if those are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)

    def among(digits: Iterable[int]) -> list[float]:
        return [float(f"{digit}e{power}") for power in powers for digit in digits if low <= digit * 10**power <= high]

    ticks = among((1, 2, 5))
    return ticks if len(ticks) <= 6 else among((1,))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
