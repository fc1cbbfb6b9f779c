"""When a challenger is stopped: for its errors, or for answers that differ from the primary model's.

Two tests run side by side, each a `MeanTest` (valid at any time) at half of the significance, so that one `Canary`
stops a challenger within both thresholds with a probability of at most `significance`, over any number of requests:

- **errors**: the mean of "the request failed" is at most `max_error_rate`;
- **agreement**: the mean share of images that get another label than the primary's is at most 1 - `min_agreement`,
  over the requests that both models answered.

Out of scope: latency, which depends on the load of the trial itself (`gradtrail verdict` measures it), and the shares
of the predicted classes, which differ if the clients of the two models differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradtrail.serving.rollout.sequential import MeanTest
from gradtrail.serving.slo import CanaryThresholds

_NUM_TESTS = 2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The answer of one model to one request."""

    labels: Sequence[int] = ()  # predicted label of each image; empty if the request failed
    confidences: Sequence[float] = ()  # probability of each label
    seconds: float  # from the request's entry into the model's queue to its answer
    error: str | None = None  # type of the failure


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The reason why a challenger was stopped."""

    test: str  # `errors` or `agreement`
    value: float  # observed share
    limit: float  # threshold in deploy/slo.yaml
    requests: int  # number of the challenger's requests until then, with failures

    def __str__(self) -> str:
        """One line for the log and for `GET /rollout`."""
        reason = {
            "errors": f"{self.value:.1%} of its requests failed; the limit is {self.limit:.1%}",
            "agreement": f"{self.value:.1%} of its labels are the primary's; the limit is {self.limit:.1%}",
        }[self.test]
        return f"{reason} (after {self.requests} requests to this process)"


class Canary:
    """Tests a challenger after every request; reports once that it must be stopped, and stays stopped."""

    def __init__(self, thresholds: CanaryThresholds) -> None:
        self.thresholds = thresholds
        self.requests = 0
        self.stopped: Stopped | None = None
        significance = thresholds.significance / _NUM_TESTS
        self._errors = MeanTest(thresholds.max_error_rate, significance)
        self._disagreement = MeanTest(1 - thresholds.min_agreement, significance)
        self._disagrees = False  # once true it stays true, as Ville's inequality covers any time

    def observe(self, challenger: Outcome, primary: Outcome | None = None) -> Stopped | None:
        """Add the outcome of one request; return why the challenger must be stopped, once, or None.

        Args:
            challenger: The challenger's outcome.
            primary: The primary's outcome for the same images; None if it was not asked or failed.
        """
        if self.stopped is not None:
            return None
        self.requests += 1
        if self._errors.observe(float(challenger.error is not None)):
            return self._stop("errors", self._errors.mean, self.thresholds.max_error_rate)
        if challenger.error is None and primary is not None and primary.labels:
            different = sum(a != b for a, b in zip(primary.labels, challenger.labels, strict=True))
            self._disagrees |= self._disagreement.observe(different / len(primary.labels))
        if self._disagrees and self.requests >= self.thresholds.min_requests:
            return self._stop("agreement", 1 - self._disagreement.mean, self.thresholds.min_agreement)
        return None

    def _stop(self, test: str, value: float, limit: float) -> Stopped:
        self.stopped = Stopped(test=test, value=value, limit=limit, requests=self.requests)
        return self.stopped
