"""Challengers that must be stopped, and those that must not, by simulation with fixed seeds."""

from collections.abc import Callable

import numpy as np
import pytest

from gradtrail.serving.rollout.canary import Canary, Outcome, Stopped
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


def test_failures_of_the_primary_do_not_count_against_the_challenger() -> None:
    canary = Canary(thresholds())
    assert [canary.observe(outcome(1), FAILED) for _ in range(500)] == [None] * 500


def test_request_of_many_images_counts_once() -> None:
    """Images of a request resemble each other: 200 that differ in one request prove nothing yet."""
    canary = Canary(thresholds(min_requests=1))
    assert canary.observe(outcome(2, images=200), outcome(1, images=200)) is None
