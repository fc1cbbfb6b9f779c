"""Challengers that must be stopped, and those that must not, by simulation; the split of ids; the sequential test."""

import math
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from factories import ROOT

from gradtrail.serving.rollout.canary import Canary, Outcome, Stopped
from gradtrail.serving.rollout.sequential import RESTART, MeanTest
from gradtrail.serving.rollout.split import is_in_canary, position
from gradtrail.serving.slo import CanaryThresholds

Challenger = Callable[[np.random.Generator, Outcome], Outcome]


def thresholds(min_requests: int = 30) -> CanaryThresholds:
    return CanaryThresholds(min_requests=min_requests, max_error_rate=0.01, min_agreement=0.97, significance=0.01)


def outcome(label: int, images: int = 1) -> Outcome:
    return Outcome(labels=[label] * images, confidences=[0.98] * images, seconds=0.003)


FAILED = Outcome(seconds=0.001, error="failed")


def good(generator: np.random.Generator, primary: Outcome) -> Outcome:
    """A sound challenger: another label for 1.5 % of the images."""
    return primary if generator.random() > 0.015 else outcome(int(generator.integers(10)))


def seven(generator: np.random.Generator, primary: Outcome) -> Outcome:
    return outcome(7)


def throwing(generator: np.random.Generator, primary: Outcome) -> Outcome:
    return FAILED


def throwing_sometimes(generator: np.random.Generator, primary: Outcome) -> Outcome:
    return FAILED if generator.random() < 0.15 else good(generator, primary)


def rotated(generator: np.random.Generator, primary: Outcome) -> Outcome:
    """The primary's distribution of classes, but hardly ever the same label."""
    return outcome((good(generator, primary).labels[0] + 1) % 10)


def at_the_thresholds(generator: np.random.Generator, primary: Outcome) -> Outcome:
    """The hardest null hypothesis: errors and disagreements at their thresholds."""
    if generator.random() < 0.01:
        return FAILED
    return primary if generator.random() > 0.03 else outcome((primary.labels[0] + 1) % 10)


def simulate(challenger: Challenger, *, seed: int, requests: int, compared: float = 1.0) -> Stopped | None:
    """Send requests to the challenger, and a share of them to the primary too; return why it was stopped."""
    generator = np.random.default_rng(seed)
    canary = Canary(thresholds())
    for _ in range(requests):
        primary = outcome(int(generator.integers(10)))
        is_compared = generator.random() < compared
        stopped = canary.observe(challenger(generator, primary), primary if is_compared else None)
        if stopped is not None:
            return stopped
    return None


@pytest.mark.parametrize("compared", [1.0, 0.2])
@pytest.mark.parametrize(
    ("challenger", "test"),
    [(seven, "agreement"), (rotated, "agreement"), (throwing, "errors"), (throwing_sometimes, "errors")],
)
def test_bad_challenger_is_stopped_before_200_of_its_requests(
    challenger: Challenger, test: str, compared: float
) -> None:
    for seed in range(10):
        stopped = simulate(challenger, seed=seed, requests=1_000, compared=compared)
        assert stopped is not None, seed
        assert stopped.test == test
        assert stopped.requests < 200
        assert stopped.test == "errors" or stopped.requests >= thresholds().min_requests


def test_good_challenger_is_not_stopped() -> None:
    assert not any(simulate(good, seed=seed, requests=500) for seed in range(50))


@pytest.mark.slow
def test_challenger_at_its_thresholds_is_not_stopped() -> None:
    assert not any(simulate(at_the_thresholds, seed=seed, requests=10_000) for seed in range(40))


def test_disagreement_stops_only_after_the_minimum_of_requests_and_once() -> None:
    canary = Canary(thresholds(min_requests=30))
    stops = [canary.observe(outcome(2), outcome(1)) for _ in range(40)]
    assert [number for number, stopped in enumerate(stops, 1) if stopped is not None] == [30]
    message = "0.0% of its labels are the primary's; the limit is 97.0% (after 30 requests to this process)"
    assert str(canary.stopped) == message


def test_failures_of_the_primary_and_many_images_of_one_request_prove_nothing() -> None:
    canary = Canary(thresholds())
    assert [canary.observe(outcome(1), FAILED) for _ in range(500)] == [None] * 500
    canary = Canary(thresholds(min_requests=1))
    assert canary.observe(outcome(2, images=200), outcome(1, images=200)) is None


IDS = [f"client-{number}" for number in range(20_000)]


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_share_of_ids_is_the_configured_share(share: float) -> None:
    observed = sum(is_in_canary(name, share) for name in IDS) / len(IDS)
    assert abs(observed - share) < 4 * math.sqrt(share * (1 - share) / len(IDS))


def test_shares_are_nested_and_salts_split_independently() -> None:
    none, small, large, everyone = (
        {name for name in IDS if is_in_canary(name, share)} for share in (0.0, 0.1, 0.25, 1.0)
    )
    assert none < small < large < everyone
    assert (len(none), len(everyone)) == (0, len(IDS))
    first = {name for name in IDS if is_in_canary(name, 0.5)}
    second = {name for name in IDS if is_in_canary(name, 0.5, salt="compare")}
    assert abs(len(first & second) / len(IDS) - 0.25) < 0.02


def test_position_does_not_depend_on_the_process() -> None:
    code = "from gradtrail.serving.rollout.split import position; print(position('client-1'), position('\\xe4\\udcff'))"
    odd = position("ä\udcff")
    expected = f"{position('client-1')} {odd}"
    for seed in ("1", "2"):
        # Not `sys.path`: MLflow leaves the code of models there that other tests have loaded.
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split("\n")[-2] == expected, ran.stderr
    assert position("client-1") == pytest.approx(0.78373126)


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
