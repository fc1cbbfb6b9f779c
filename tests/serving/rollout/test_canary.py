"""Challengers that must be stopped, and those that must not, by simulation with fixed seeds."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from gradtrail.serving.rollout.canary import Canary, Outcome, Stopped

Challenger = Callable[[np.random.Generator, Outcome], Outcome]


@dataclass(frozen=True, kw_only=True)
class Limits:
    min_requests: int = 30
    max_error_rate: float = 0.01
    max_latency_ratio: float = 1.5
    min_agreement: float = 0.97
    max_class_share_distance: float = 0.2
    significance: float = 0.01


def primary(generator: np.random.Generator) -> Outcome:
    """An answer of a sound model: 3 ms in the median with a long tail, one image, classes alike."""
    return Outcome(
        labels=[int(generator.integers(10))], confidences=[0.98], seconds=float(0.003 * generator.lognormal(0, 0.4))
    )


def good(generator: np.random.Generator, answer: Outcome, disagreement: float = 0.015) -> Outcome:
    """A sound challenger: as fast, and of another opinion on 1.5 % of the images."""
    label = answer.labels[0] if generator.random() > disagreement else int(generator.integers(10))
    return Outcome(labels=[label], confidences=[0.98], seconds=float(0.003 * generator.lognormal(0, 0.4)))


def seven(generator: np.random.Generator, answer: Outcome) -> Outcome:
    return Outcome(labels=[7], confidences=[1.0], seconds=good(generator, answer).seconds)


def three_times_slower(generator: np.random.Generator, answer: Outcome) -> Outcome:
    sound = good(generator, answer)
    return Outcome(labels=sound.labels, confidences=sound.confidences, seconds=3 * sound.seconds)


def fifty_milliseconds_slower(generator: np.random.Generator, answer: Outcome) -> Outcome:
    sound = good(generator, answer)
    return Outcome(labels=sound.labels, confidences=sound.confidences, seconds=0.05 + sound.seconds)


def throwing(generator: np.random.Generator, answer: Outcome) -> Outcome:
    return Outcome(seconds=0.001, error="failed")


def throwing_at_times(generator: np.random.Generator, answer: Outcome) -> Outcome:
    return throwing(generator, answer) if generator.random() < 0.15 else good(generator, answer)


def rotated(generator: np.random.Generator, answer: Outcome) -> Outcome:
    """As many of each class as the primary gives, and hardly ever the same one."""
    sound = good(generator, answer)
    return Outcome(labels=[(sound.labels[0] + 1) % 10], confidences=[0.98], seconds=sound.seconds)


def simulate(
    challenger: Challenger, *, seed: int, requests: int, share: float = 0.1, compared: float = 1.0
) -> Stopped | None:
    """Send requests of which the challenger gets a share, and both get a share of those; return why it was stopped."""
    generator = np.random.default_rng(seed)
    canary = Canary(Limits())
    for _ in range(requests):
        answer = primary(generator)
        if generator.random() >= share:
            found = canary.observe(answer, None)
        else:
            is_compared = generator.random() < compared
            found = canary.observe(answer if is_compared else None, challenger(generator, answer))
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("compared", [1.0, 0.2, 0.0])
@pytest.mark.parametrize(
    ("challenger", "tests"),
    [
        (seven, {"agreement", "class share"}),
        (three_times_slower, {"latency"}),
        (fifty_milliseconds_slower, {"latency"}),
        (throwing, {"errors"}),
        (throwing_at_times, {"errors"}),
    ],
)
def test_a_bad_challenger_is_stopped_before_it_has_answered_200_of_10000_requests(
    challenger: Challenger, tests: set[str], compared: float
) -> None:
    for seed in range(10):
        found = simulate(challenger, seed=seed, requests=10_000, compared=compared)
        assert found is not None, seed
        assert found.test in tests
        assert found.requests < 200
        assert found.test == "errors" or found.requests >= Limits().min_requests


def test_swapped_classes_are_seen_where_answers_are_compared() -> None:
    found = simulate(rotated, seed=0, requests=10_000)
    assert found is not None
    assert found.test == "agreement"
    assert found.requests < 200
    assert simulate(rotated, seed=0, requests=5_000, compared=0.0) is None, "shares of classes cannot show it"


def test_a_good_challenger_is_stopped_at_most_as_often_as_the_significance_says() -> None:
    stopped = [found for seed in range(50) if (found := simulate(good, seed=seed, requests=1_000, share=0.5))]
    assert not stopped


@pytest.mark.slow
def test_a_challenger_at_its_limits_is_stopped_at_most_as_often_as_the_significance_says() -> None:
    """The hardest null hypothesis: errors and disagreements at their limits, all of 10,000 requests its own."""

    def at_the_limit(generator: np.random.Generator, answer: Outcome) -> Outcome:
        if generator.random() < Limits().max_error_rate:
            return throwing(generator, answer)
        label = answer.labels[0] if generator.random() > 0.03 else (answer.labels[0] + 1) % 10
        return Outcome(labels=[label], confidences=[0.9], seconds=1.5 * good(generator, answer).seconds)

    stopped = [found for seed in range(40) if (found := simulate(at_the_limit, seed=seed, requests=10_000, share=1.0))]
    assert not stopped


def test_nothing_is_stopped_before_the_least_number_of_requests() -> None:
    canary = Canary(Limits(min_requests=30))
    sound = Outcome(labels=[1], confidences=[0.9], seconds=0.003)
    other = Outcome(labels=[2], confidences=[0.9], seconds=0.003)
    found = [canary.observe(sound, other) for _ in range(40)]
    assert [number for number, each in enumerate(found, 1) if each is not None] == [30], "and it is said once"
    assert (
        str(canary.stopped)
        == "0.0% of its labels are the primary's, at least 97.0% must be (after 30 requests to this process)"
    )


def test_failures_in_a_row_stop_it_before() -> None:
    canary = Canary(Limits(min_requests=30))
    failed = Outcome(seconds=0.001, error="failed")
    found = next(each for _ in range(30) if (each := canary.observe(None, failed)))
    assert 1 < found.requests <= 5, "one failure is no proof"
    assert str(found).startswith("100.0% of its requests failed, at most 1.0% may")


def test_failures_of_the_primary_do_not_count_against_the_challenger() -> None:
    canary = Canary(Limits())
    sound = Outcome(labels=[1], confidences=[0.9], seconds=0.003)
    failed = Outcome(seconds=10.0, error="failed")
    assert [canary.observe(failed, sound) for _ in range(500)] == [None] * 500


def test_requests_of_many_images_count_as_one() -> None:
    """Images of a request resemble each other: 200 that differ in one request prove nothing yet."""
    canary = Canary(Limits(min_requests=1))
    sound = Outcome(labels=[1] * 200, confidences=[0.9] * 200, seconds=0.003)
    other = Outcome(labels=[2] * 200, confidences=[0.9] * 200, seconds=0.003)
    assert canary.observe(sound, other) is None


def test_seconds_are_compared_only_of_requests_alike() -> None:
    """Of as many images, none of them empty, and the challenger's waited behind no more others."""

    def outcome(images: int, seconds: float, ahead: int = 0) -> Outcome:
        return Outcome(labels=[1] * images, confidences=[0.9] * images, seconds=seconds, ahead=ahead)

    for primary, challenger in (
        (outcome(1, 0.001), outcome(40, 0.02)),
        (outcome(0, 0.00001), outcome(0, 0.001)),
        (outcome(0, 0.00001), outcome(1, 0.001)),
        (outcome(1, 0.001, ahead=1), outcome(1, 0.02, ahead=2)),
    ):
        canary = Canary(Limits(min_requests=1))
        for _ in range(200):
            assert canary.observe(primary, None) is None
            assert canary.observe(None, challenger) is None
    assert canary.observe(outcome(1, 0.001, ahead=2), outcome(1, 0.02, ahead=2)) is None
    found = [canary.observe(outcome(1, 0.001, ahead=2), outcome(1, 0.02, ahead=2)) for _ in range(100)]
    assert [each.test for each in found if each] == ["latency"]
