"""Charts place values where their axes say, and number the axes with round numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.stages.report.charts import Chart, Series, Stop, linear_ticks


def a_chart(points: list[tuple[float, float]], *, log: bool = False, square: bool = False) -> Chart:
    series = [Series(name="a", style="train", points=points)]
    stops = [Stop(x=x, lines=[f"{y:g}"]) for x, y in points]
    return Chart(id="c", title="t", alt="a", x_label="x", series=series, stops=stops, log=log, square=square)


@pytest.mark.parametrize("log", [False, True])
def test_line_goes_through_the_values_as_the_ticks_number_them(log: bool) -> None:
    chart = a_chart([(1, 0.5), (2, 1.0), (4, 0.1)], log=log)
    ((_, path, dots),) = chart.lines
    assert path == " ".join(f"{letter}{x} {y}" for letter, (x, y) in zip("MLL", dots, strict=True))
    assert {tick.text: tick.place for tick in chart.x_ticks}["2"] == dots[1][0]
    ticks = {tick.text: tick.place for tick in chart.y_ticks}
    assert ticks["1"] == dots[1][1]
    assert ("0" in ticks) == (not log)
    left, right, top, bottom = chart.frame
    assert all(left <= float(x) <= right and top <= float(y) <= bottom for x, y in dots)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_values_outside_of_axis_are_left_out(value: float) -> None:
    ((_, path, dots),) = a_chart([(1, 0.5), (2, value)], log=True).lines
    assert len(dots) == path.count(" ") == 1


def test_every_place_of_the_axis_belongs_to_the_nearest_stop() -> None:
    chart = a_chart([(0, 1), (1, 1), (4, 1)])
    left, right, _, _ = chart.frame
    edges = [(float(start), float(start) + float(width)) for _, _, start, width in chart.hits]
    assert edges[0][0] == left
    assert edges[-1][1] == right
    assert [end for _, end in edges[:-1]] == pytest.approx([start for start, _ in edges[1:]], abs=0.11)
    assert [stop.lines for stop, *_ in chart.hits] == [["1"]] * 3


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-6, 1e6), most=st.integers(3, 10), whole=st.booleans())
def test_ticks_are_few_even_round_and_inside(low: float, span: float, most: int, whole: bool) -> None:
    ticks = linear_ticks(low, low + span, most, whole=whole)
    assert len(ticks) <= most or whole
    slack = 1e-6 * max(1.0, abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)
    assert not whole or all(tick == int(tick) for tick in ticks)
