"""The sequential test, and challengers that it must stop or must not stop, by simulation."""

import math

import numpy as np
import pytest

from gradtrail.serving.rollout import Evidence
from gradtrail.serving.sequential import RESTART, MeanTest
from gradtrail.serving.slo import CanaryThresholds

STRICT = CanaryThresholds(min_requests=30, max_error_rate=0.01, min_agreement=0.97, significance=0.01)


def first_alarm(values: np.ndarray, limit: float, significance: float) -> int | None:
    """Return the number of observations until the test reports a mean above the limit."""
    test = MeanTest(limit, significance)
    return next((number for number, value in enumerate(values, 1) if test.observe(float(value))), None)


@pytest.mark.parametrize("limit", [0.01, 0.5])
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


def simulate(
    error_rate: float, agreement: float, *, seed: int, requests: int, compared: float = 1.0, images: int = 1
) -> Evidence:
    """Send requests to a challenger, and compare a share of its answers, until it is stopped."""
    generator = np.random.default_rng(seed)
    evidence = Evidence(STRICT)
    while evidence.requests < requests and not evidence.stopped:
        has_failed = bool(generator.random() < error_rate)
        evidence.add_request(has_failed=has_failed)
        if not has_failed and generator.random() < compared:
            evidence.add_comparison(generator.binomial(images, agreement) / images)
    return evidence


@pytest.mark.parametrize("compared", [1.0, 0.2])
@pytest.mark.parametrize(
    ("error_rate", "agreement", "test"),
    [(0.0, 0.1, "agreement"), (0.0, 0.02, "agreement"), (1.0, 1.0, "errors"), (0.15, 0.985, "errors")],
)
def test_bad_challenger_is_stopped_before_200_of_its_requests(
    error_rate: float, agreement: float, test: str, compared: float
) -> None:
    for seed in range(5):
        evidence = simulate(error_rate, agreement, seed=seed, requests=1_000, compared=compared)
        assert evidence.stopped is not None, seed
        assert evidence.stopped["because"] == test
        assert evidence.requests < 200
        assert test == "errors" or evidence.requests >= STRICT.min_requests


def test_good_challenger_is_not_stopped() -> None:
    assert not any(simulate(0.0, 0.985, seed=seed, requests=500).stopped for seed in range(50))


@pytest.mark.slow
@pytest.mark.parametrize("images", [1, 8])
def test_challenger_at_its_thresholds_is_not_stopped(images: int) -> None:
    """Errors and disagreements at the thresholds are the hardest null hypothesis."""
    stops = [simulate(0.01, 0.97, seed=seed, requests=10_000, images=images).stopped for seed in range(20)]
    assert not any(stops)


def test_disagreement_stops_only_after_the_minimum_of_requests_and_once() -> None:
    evidence, stops = Evidence(STRICT), []
    for _ in range(40):
        evidence.add_request(has_failed=False)
        evidence.add_comparison(0.0)
        stops.append(evidence.stopped)
    assert stops[:29] == [None] * 29
    message = "0.0% of its labels are the primary's; the limit is 97.0% (after 30 requests to this process)"
    assert stops[29:] == [{"because": "agreement", "message": message}] * 11
