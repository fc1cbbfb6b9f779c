"""Charts place values where their axes say, and number the axes with round numbers."""

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


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-6, 1e6), most=st.integers(3, 10), whole=st.booleans())
def test_ticks_are_few_even_round_and_inside(low: float, span: float, most: int, whole: bool) -> None:
    ticks = linear_ticks(low, low + span, most, whole=whole)
    assert len(ticks) <= most or whole
    slack = 1e-6 * max(1.0, abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)
    assert not whole or all(tick == int(tick) for tick in ticks)
