"""Rates are work by the clock's time."""

import itertools

import pytest

from gradtrail.core.profile import benchmark


def test_rates_are_the_work_by_the_median_of_the_times() -> None:
    ticks = itertools.accumulate(itertools.cycle([0.0, 7.0, 0.0, 1.0, 0.0, 3.0, 0.0, 2.0]))  # a call takes 7, 1, 3, 2
    rates = benchmark.measure_rates(lambda: next(ticks))
    assert rates.flops_per_second == pytest.approx(2 * benchmark._SIDE**3 / 2)
    assert rates.bytes_per_second == pytest.approx(2 * benchmark._COPIED_BYTES / 2)
