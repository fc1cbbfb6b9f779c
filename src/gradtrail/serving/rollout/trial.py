"""A challenger on trial: it answers a share of the clients, or nobody, and is compared with the primary model.

**Canary**: ids in the share get the challenger's answer. The primary answers the same images afterwards, beside the
client's way, so that the two can be compared; a failure of the challenger becomes the primary's answer at once, and no
client sees it. **Shadow**: every client gets the primary's answer; the challenger answers the same images afterwards.

What it costs: a canary of 10 % runs 10 % more images than no canary, a shadow twice as many. Comparisons are the first
to go when there is much to do: at most `MAX_COMPARISONS` are under way, further requests are not compared. Nor does a
shadow compare a request that would wait longer for the challenger than it has waited for the primary.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from gradtrail.core.common.validation import check
from gradtrail.serving.monitoring.metrics import Rollout, ServerMetrics
from gradtrail.serving.rollout.canary import Canary, CanaryLimits, Outcome
from gradtrail.serving.rollout.split import in_canary
from gradtrail.serving.server.guard import DEADLINE
from gradtrail.serving.server.refusal import Refusal
from gradtrail.serving.server.router import Answer, Images, Probabilities, Router, Served
from gradtrail.support.errors import UserError

LOG = logging.getLogger("gradtrail.serve")
MAX_COMPARISONS = 16  # under way
PATIENCE_SECONDS = 2.0  # longest wait for the challenger's answer; then the primary answers


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """How a challenger is tried.

    Attributes:
        share: of the ids that it answers, above 0 to 1; 0 for none: a shadow.
        limits: past which it is stopped.
        patience_seconds: Longest wait for its answer. A request that has less than twice this time left is answered by
            the primary, so that a challenger that hangs never uses up a client's time.
    """

    share: float
    limits: CanaryLimits
    patience_seconds: float = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        check("canary", self.share, at_least=0, at_most=1)


class Trial:
    """Decides whether the challenger answers a request, and stops it past its limits; lives in the event loop."""

    def __init__(self, config: TrialConfig, router: Router, metrics: ServerMetrics) -> None:
        """Begin without a challenger."""
        self.config, self._router, self._metrics = config, router, metrics
        self._challenger: Served | None = None
        self._version: str | None = None
        self._begin()
        self._has_told = False  # of its first exception
        self._against = ""  # digest of the primary that the evidence is about
        self._tasks: set[asyncio.Task[None]] = set()
        self._tell("off")

    @property
    def state(self) -> Rollout:
        """What the challenger does now."""
        if self._canary.stopped is not None:
            return "stopped"
        if self._challenger is None:
            return "off"
        return "canary" if self.config.share else "shadow"

    def challenge(self, served: Served | None) -> None:
        """Try this model from now on, from the beginning; None ends the trial.

        Raises:
            UserError: it takes other images than the primary, or has other classes or another name.
        """
        if served is not None and not fit(served, self._router.current):
            served.batcher.close()
            unlike = f"takes other images, or has other classes or another name, than {self._router.current.about.name}"
            raise UserError(f"challenger {served.version}, {served.about.name}: {unlike}")
        old, self._challenger = self._challenger, served
        self._version = served.version if served else None
        self._begin()
        self._has_told = False
        if old is not None:
            old.batcher.close()
        if served is None:
            self._metrics.unloaded("challenger")
        else:
            self._metrics.serving("challenger", served.about.name, served.version, served.digest)
            LOG.info("the challenger, version %s, is on trial; %s", served.version, self._guarantee())
        self._tell(self.state)

    def _begin(self) -> None:
        """Begin without evidence against the challenger."""
        self._canary, self._since = Canary(self.config.limits), datetime.now(UTC).isoformat(timespec="seconds")

    def _guarantee(self) -> str:
        """Return what the significance holds for: the evidence is in this process's memory."""
        chance = f"within all limits it is stopped with a probability of at most {self.config.limits.significance:g}"
        return f"{chance} by this process, in this trial of it against this primary; other processes decide themselves"

    def about(self) -> dict[str, Any]:
        """Return what `GET /rollout` answers."""
        stopped = self._canary.stopped
        return {
            "state": self.state,
            "challenger": self._version,
            "share": self.config.share if self.state == "canary" else 0.0,
            "requests": self._canary.requests,
            "since": self._since,
            "guarantee": self._guarantee(),
            "stopped": stopped and {"because": stopped.test, "message": str(stopped)},
        }

    async def answer(self, images: Images, request_id: str | None, current: Served) -> Answer:
        """Answer one request, by `current` or by the challenger.

        Raises:
            Refusal: too much waits (429).
            Exception: what the primary raised.
        """
        challenger = self._challenger
        if challenger is None or self._is_over(current):
            return await self._router.answer_by(current, images)
        is_in_time = DEADLINE.get() - asyncio.get_running_loop().time() >= 2 * self.config.patience_seconds
        if is_in_time and in_canary(request_id or secrets.token_hex(8), self.config.share):
            return await self._by_challenger(images, challenger, current)
        started, ahead = time.perf_counter(), current.batcher.num_ahead
        answer = await self._router.answer_by(current, images)
        outcome = _outcome(answer.probabilities, time.perf_counter() - started, ahead)
        if self.config.share:
            self._observe(challenger, outcome, None)
        elif self._tasks and challenger.batcher.num_ahead > ahead:  # it would wait longer than the primary did
            self._metrics.comparison_dropped()
        else:
            self._later(self._shadow(images, challenger, outcome))
        return answer

    async def _by_challenger(self, images: Images, challenger: Served, current: Served) -> Answer:
        is_first = not challenger.num_answered
        challenger.num_answered += 1
        probabilities, outcome = await self._try(challenger, images)
        if outcome.error is None and self._challenger is challenger:
            self._later(self._compare(images, challenger, current, outcome), instead=outcome)
            return Answer(probabilities=probabilities, by=challenger, is_first=is_first)
        if outcome.error != "overloaded":  # by the server's own limit, which tells nothing of the model
            self._observe(challenger, None, outcome)
        self._metrics.fell_back()
        return await self._router.answer_by(current, images)

    async def _try(self, challenger: Served, images: Images) -> tuple[Probabilities, Outcome]:
        """Ask the challenger; whatever goes wrong is an outcome."""
        started, ahead = time.perf_counter(), challenger.batcher.num_ahead
        probabilities = np.zeros((0, 0), np.float32)
        try:
            async with asyncio.timeout(self.config.patience_seconds):
                probabilities = await challenger.batcher.predict(images)
            outcome = _outcome(probabilities, time.perf_counter() - started, ahead)
        except TimeoutError:
            outcome = Outcome(seconds=self.config.patience_seconds, error="timeout")
        except Refusal:
            outcome = Outcome(seconds=time.perf_counter() - started, error="overloaded")
        except Exception:
            outcome = Outcome(seconds=time.perf_counter() - started, error="failed")
            if not self._has_told:
                self._has_told = True
                LOG.warning("the challenger, version %s, failed", challenger.version, exc_info=True)
        if outcome.error is None:
            self._metrics.answered(
                "challenger", challenger.version, outcome.seconds, outcome.labels, outcome.confidences
            )
        elif outcome.error != "overloaded":
            self._metrics.failed("challenger", challenger.version)
        return probabilities, outcome

    async def _compare(self, images: Images, challenger: Served, current: Served, outcome: Outcome) -> None:
        """Ask the primary what it makes of the images that the challenger has answered."""
        started, ahead = time.perf_counter(), current.batcher.num_ahead
        try:
            probabilities = await current.batcher.predict(images)
        except Exception:  # its own failures are counted where it answers clients
            self._observe(challenger, None, outcome)
        else:
            self._observe(challenger, _outcome(probabilities, time.perf_counter() - started, ahead), outcome)

    async def _shadow(self, images: Images, challenger: Served, primary: Outcome) -> None:
        """Ask the challenger what it makes of the images that the primary has answered."""
        _, outcome = await self._try(challenger, images)
        if outcome.error == "overloaded":
            self._metrics.comparison_dropped()
            return
        self._observe(challenger, primary, outcome)

    def _later(self, comparison: Coroutine[Any, Any, None], instead: Outcome | None = None) -> None:
        if len(self._tasks) >= MAX_COMPARISONS:
            comparison.close()
            self._metrics.comparison_dropped()
            if instead is not None and self._challenger is not None:
                self._observe(self._challenger, None, instead)
            return
        task = asyncio.get_running_loop().create_task(comparison)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _observe(self, challenger: Served, primary: Outcome | None, outcome: Outcome | None) -> None:
        """Add to the evidence, and stop the challenger where it suffices."""
        if challenger is not self._challenger:  # an answer that came after its end
            return
        if primary and outcome and not outcome.error:
            agreed = sum(a == b for a, b in zip(primary.labels, outcome.labels, strict=True))
            self._metrics.compared(agreed, len(outcome.labels) - agreed)
        stopped = self._canary.observe(primary, outcome)
        if stopped is not None:
            self._challenger = None
            challenger.batcher.close()
            self._metrics.unloaded("challenger")
            self._metrics.stopped(stopped.test)
            LOG.warning("the challenger, version %s, is stopped: %s", challenger.version, stopped)

    def _is_over(self, current: Served) -> bool:
        """Begin anew against another primary; end where the challenger has become the primary."""
        if current.digest == self._against or self._challenger is None:
            return False
        self._against = current.digest
        if self._challenger.digest == current.digest or not fit(self._challenger, current):
            LOG.warning("version %s is the primary model now; the trial of %s ends", current.version, self._version)
            self.challenge(None)
            return True
        self._begin()
        return False

    def _tell(self, state: Rollout) -> None:
        self._metrics.rollout(state, self.config.share if state == "canary" else 0.0)


def fit(challenger: Served, primary: Served) -> bool:
    """Whether a model takes the images of another one, and has its classes and its name."""
    of_both = [(each.about.image_shape, each.about.classes, each.about.name) for each in (challenger, primary)]
    return of_both[0] == of_both[1]


def _outcome(probabilities: Probabilities, seconds: float, ahead: int) -> Outcome:
    """Return the outcome of a request that was answered."""
    if not len(probabilities):
        return Outcome(seconds=seconds, ahead=ahead)
    return Outcome(
        labels=probabilities.argmax(axis=1).tolist(),
        confidences=probabilities.max(axis=1).tolist(),
        seconds=seconds,
        ahead=ahead,
    )
