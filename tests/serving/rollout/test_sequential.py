"""The sequential test of a mean, by simulation with fixed seeds."""

import math

import numpy as np
import pytest

from gradtrail.serving.rollout.sequential import RESTART, MeanTest


def first_alarm(values: np.ndarray, limit: float, significance: float) -> int | None:
    """Return the number of observations until the test reports a mean above the limit."""
    test = MeanTest(limit, significance)
    return next((number for number, value in enumerate(values, 1) if test.observe(float(value))), None)


@pytest.mark.parametrize("limit", [0.01, 0.1, 0.5])
def test_share_of_false_alarms_is_at_most_the_significance(limit: float) -> None:
    generator = np.random.default_rng(0)
    sequences, significance = 200, 0.1
    alarms = sum(first_alarm(generator.random(1200) < limit, limit, significance) is not None for _ in range(sequences))
    assert alarms <= significance * sequences


def test_evidence_is_a_martingale() -> None:
    """Its mean over all sequences of eight coin flips is its start, and never more for smaller means."""
    start = 6 / math.pi**2

    def mean_evidence(share: float) -> float:
        total = 0.0
        for bits in range(2**8):
            test = MeanTest(0.3, 0.01)
            flips = [bits >> place & 1 for place in range(8)]
            for flip in flips:
                test.observe(float(flip))
            total += share ** sum(flips) * (1 - share) ** (8 - sum(flips)) * math.exp(test.log_evidence)
        return total

    assert mean_evidence(0.3) == pytest.approx(start)
    assert mean_evidence(0.2) < start < mean_evidence(0.4)


def test_late_change_is_detected_soon() -> None:
    generator = np.random.default_rng(1)
    values = np.concatenate([generator.random(8 * RESTART) < 0.002, generator.random(500) < 0.3])
    alarm = first_alarm(values, 0.01, 0.01)
    assert alarm is not None
    assert 8 * RESTART < alarm < 8 * RESTART + 60


def test_values_between_zero_and_one_count_by_their_size() -> None:
    assert first_alarm(np.full(500, 0.4), 0.1, 0.01) is not None
    assert first_alarm(np.full(5000, 0.1), 0.1, 0.01) is None


def test_limit_of_zero_needs_more_than_one_failure() -> None:
    test = MeanTest(0.0, 0.01)
    assert [test.observe(0.0) for _ in range(100)] == [False] * 100
    assert test.mean == 0
