"""When a challenger is stopped: its errors, its latency and its answers beside those of the primary model.

Four tests run side by side, each a `MeanTest` (valid whenever one looks) at a quarter of the significance, so that one
`Canary` stops a challenger within all limits with a probability of at most `significance`, over any number of requests:

- **errors**: the mean of "it failed" is at most `max_error_rate`;
- **latency**: in at most half of the pairs of answers the challenger takes more than `max_latency_ratio` times as long
  as the primary (a sequential sign test: outliers of either weigh one); pairs count whose requests have as many images
  and where the challenger's request did not wait behind more others than the primary's did;
- **agreement**: the mean share of images that get another label than the primary's is at most 1 - `min_agreement`; this
  one needs answers of both to the same images;
- **class share**: the total variation distance of the labels' distributions is at most `max_class_share_distance`. That
  distance is the largest difference that any set of classes shows; the set is chosen by the pairs before (classes that
  the challenger gives more often so far), and a pair scores (1 + share of the challenger's labels in it - share of the
  primary's) / 2, whose mean is then at most (1 + distance) / 2. It is the two-sample test of S. Shekhar and A. Ramdas,
  "Nonparametric Two-Sample Testing by Betting", IEEE Trans. Inf. Theory 70(2), 2024, and needs no common images.

A pair is the answers of both to one request where both were asked, else each one's latest answer that has no partner.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gradtrail.serving.rollout.sequential import MeanTest

WAITING = 64  # answers that may wait for a partner; the oldest is dropped
REMEMBERED = 2000  # labels of each by which the set of classes is chosen; beyond, the old ones weigh half
TESTS = ("errors", "latency", "agreement", "class share")


class CanaryLimits(Protocol):
    """The section `canary` of deploy/slo.yaml; shares from 0 to 1."""

    @property
    def min_requests(self) -> int:
        """Answers of the challenger before which nothing but errors stops it."""

    @property
    def max_error_rate(self) -> float:
        """Of the challenger's requests."""

    @property
    def max_latency_ratio(self) -> float:
        """Challenger's seconds over the primary's, in the median."""

    @property
    def min_agreement(self) -> float:
        """Share of images with the primary's label."""

    @property
    def max_class_share_distance(self) -> float:
        """Total variation distance of the distributions of labels."""

    @property
    def significance(self) -> float:
        """Probability that one process, in one trial, ever stops a challenger that is within all limits."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one model made of one request.

    Attributes:
        labels: of each image; empty when it failed.
        confidences: probability of each label.
        seconds: from the request's entry into the model's queue to its answer.
        error: kind of its failure, or None.
        ahead: requests that it had to wait for, `Batcher.num_ahead`.
    """

    labels: Sequence[int] = ()
    confidences: Sequence[float] = ()
    seconds: float
    error: str | None = None
    ahead: int = 0


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Why a challenger was stopped.

    Attributes:
        test: one of `TESTS`.
        value: what was seen, in the unit of the limit.
        limit: from deploy/slo.yaml.
        requests: answers of the challenger until then, failures among them.
    """

    test: str
    value: float
    limit: float
    requests: int

    def __str__(self) -> str:
        """One line for the log and for people."""
        told = {
            "errors": f"{self.value:.1%} of its requests failed, at most {self.limit:.1%} may",
            "latency": f"{self.value:.1%} of its answers took over {self.limit:g} × the primary's, at most half may",
            "agreement": f"{self.value:.1%} of its labels are the primary's, at least {self.limit:.1%} must be",
            "class share": f"its classes are distributed otherwise (distance {self.value:.2f}, limit {self.limit:.2f})",
        }[self.test]
        return f"{told} (after {self.requests} requests to this process)"


class Canary:
    """Judges a challenger after every request; says once that it is to be stopped, and stays stopped."""

    def __init__(self, limits: CanaryLimits) -> None:
        """Start without evidence against the challenger."""
        self.limits = limits
        self.requests = 0
        self.stopped: Stopped | None = None
        each = limits.significance / len(TESTS)
        self._errors = MeanTest(limits.max_error_rate, each)
        self._slower = MeanTest(0.5, each)
        self._disagreement = MeanTest(1 - limits.min_agreement, each)
        self._shifted = MeanTest((1 + limits.max_class_share_distance) / 2, each)
        self._found: dict[str, None] = {}  # tests that have found something, in order
        self._waiting: tuple[deque[Outcome], deque[Outcome]] = (deque(maxlen=WAITING), deque(maxlen=WAITING))
        self._labels: tuple[Counter[int], Counter[int]] = (Counter(), Counter())

    def observe(self, primary: Outcome | None, challenger: Outcome | None) -> Stopped | None:
        """Take what became of one request; return why the challenger is to be stopped, once, or None.

        Args:
            primary: None where the primary was not asked. A failed one says nothing about the challenger.
            challenger: None where the challenger was not asked.
        """
        if self.stopped is not None:
            return None
        if challenger is not None:
            self.requests += 1
            self._note("errors", self._errors.observe(float(challenger.error is not None)))
        first = primary if primary is not None and primary.error is None else None
        second = challenger if challenger is not None and challenger.error is None else None
        if first is not None and second is not None:
            different = sum(a != b for a, b in zip(first.labels, second.labels, strict=True))
            if first.labels:
                self._note("agreement", self._disagreement.observe(different / len(first.labels)))
            self._pair(first, second)
        elif (primary is None) != (challenger is None):
            self._wait(first, second)
        return self._verdict()

    def _note(self, test: str, is_beyond: bool) -> None:
        """Remember that a test has found something; it stays found, as Ville's inequality covers any time."""
        if is_beyond:
            self._found.setdefault(test)

    def _wait(self, primary: Outcome | None, challenger: Outcome | None) -> None:
        """Pair answers to different requests: with the latest of the other that has no partner yet."""
        for side, outcome in enumerate((primary, challenger)):
            if outcome is not None:
                self._waiting[side].append(outcome)
        while self._waiting[0] and self._waiting[1]:
            self._pair(self._waiting[0].pop(), self._waiting[1].pop())

    def _pair(self, primary: Outcome, challenger: Outcome) -> None:
        if not (primary.labels and challenger.labels):
            return
        if len(primary.labels) == len(challenger.labels) and challenger.ahead <= primary.ahead:
            slower = challenger.seconds > self.limits.max_latency_ratio * primary.seconds
            self._note("latency", self._slower.observe(float(slower)))
        more = self._given_more_often()
        shares = [sum(label in more for label in each.labels) / len(each.labels) for each in (primary, challenger)]
        self._note("class share", self._shifted.observe((1 + shares[1] - shares[0]) / 2))
        for counter, outcome in zip(self._labels, (primary, challenger), strict=True):
            counter.update(outcome.labels)
            if counter.total() > REMEMBERED:
                counter.subtract({label: count // 2 for label, count in counter.items()})

    def _given_more_often(self) -> set[int]:
        """Classes whose share is larger for the challenger, in the pairs so far."""
        totals = [max(1, counter.total()) for counter in self._labels]
        primary, challenger = self._labels
        return {label for label, count in challenger.items() if count / totals[1] > primary[label] / totals[0]}

    def _verdict(self) -> Stopped | None:
        if not self._found or (self.requests < self.limits.min_requests and "errors" not in self._found):
            return None
        values = {
            "errors": (self._errors.mean, self.limits.max_error_rate),
            "latency": (self._slower.mean, self.limits.max_latency_ratio),
            "agreement": (1 - self._disagreement.mean, self.limits.min_agreement),
            "class share": (self.distance, self.limits.max_class_share_distance),
        }
        test = "errors" if "errors" in self._found else next(iter(self._found))
        value, limit = values[test]
        self.stopped = Stopped(test=test, value=value, limit=limit, requests=self.requests)
        return self.stopped

    @property
    def distance(self) -> float:
        """Total variation distance of the labels in the pairs so far; large by chance while they are few."""
        totals = [max(1, counter.total()) for counter in self._labels]
        labels = {*self._labels[0], *self._labels[1]}
        return sum(abs(self._labels[0][each] / totals[0] - self._labels[1][each] / totals[1]) for each in labels) / 2
