"""The rates are those of the work by the clock."""

import itertools

from gradtrail.core.machine_rates import measure_rates


def test_rates_of_a_clock_that_says_a_quarter_of_a_second_for_each_call() -> None:
    ticks = itertools.count()
    rates = measure_rates(lambda: next(ticks) / 4)
    assert rates.flops_per_second == 4 * 2 * 1024**3
    assert rates.bytes_per_second == 4 * 2 * 64 * 2**20
