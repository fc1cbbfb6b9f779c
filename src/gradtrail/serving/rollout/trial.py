"""A challenger on trial: it answers a share of the clients, or none, and is compared with the primary model.

**Canary**: ids in the share get the challenger's answer. The primary answers the same images afterwards, without the
client waiting for it, so that the two can be compared. If the challenger fails, the primary answers immediately, and no
client notices. **Shadow**: every client gets the primary's answer; the challenger answers the same images afterwards.

Cost: a canary of 10 % runs 10 % more images, a shadow twice as many. Under load comparisons are skipped first: at most
`MAX_COMPARISONS` are in progress, and a shadow skips a request that would wait longer for the challenger than it waited
for the primary.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from gradtrail.core.config import Bounds
from gradtrail.serving.metrics import Rollout
from gradtrail.serving.rollout.canary import Canary, Outcome
from gradtrail.serving.rollout.split import is_in_canary
from gradtrail.serving.server.batching import Images, Probabilities
from gradtrail.serving.server.middleware import DEADLINE
from gradtrail.serving.server.router import Answer, Router, Served
from gradtrail.serving.slo import CanaryThresholds
from gradtrail.support.errors import UserError

LOG = logging.getLogger("gradtrail.serve")
MAX_COMPARISONS = 16  # in progress
PATIENCE_SECONDS = 2.0  # longest wait for the challenger's answer; then the primary answers


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """How a challenger is tried."""

    share: float  # share of the ids that the challenger answers, above 0 to 1; 0 for a shadow
    thresholds: CanaryThresholds
    # Longest wait for the challenger's answer. The primary answers a request with less than twice this time left, so
    # that a challenger that hangs never uses up a client's time.
    patience_seconds: float = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        Bounds(at_least=0, at_most=1).check("canary", self.share)


@dataclass(kw_only=True)
class Trial(Router):
    """A router that lets a challenger answer some requests, and stops it beyond its thresholds."""

    config: TrialConfig
    _challenger: Served | None = field(default=None, init=False)
    _version: str | None = field(default=None, init=False)  # version of the challenger, also after it was stopped
    _is_error_logged: bool = field(default=False, init=False)  # whether its first exception is in the log
    _primary_digest: str = field(default="", init=False)  # digest of the primary that the evidence is about
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)  # comparisons in progress
    _canary: Canary = field(init=False)
    _since: str = field(init=False)  # when the evidence began

    def __post_init__(self) -> None:
        self._reset_evidence()

    @property
    def state(self) -> Rollout:
        """The state of the rollout."""
        if self._canary.stopped is not None:
            return "stopped"
        if self._challenger is None:
            return "off"
        return "canary" if self.config.share else "shadow"

    def challenge(self, served: Served | None) -> None:
        """Start the trial of this model without evidence; None ends the trial.

        Raises:
            UserError: The model takes other images than the primary, or has other classes or another name.
        """
        if served is not None and not are_interchangeable(served, self.current):
            served.batcher.close()
            difference = f"takes other images, or has other classes or another name, than {self.current.about.name}"
            raise UserError(f"challenger {served.version}, {served.about.name}: {difference}")
        old, self._challenger = self._challenger, served
        self._version = served.version if served else None
        self._is_error_logged = False
        self._reset_evidence()
        if old is not None:
            old.batcher.close()
        if served is None:
            self.metrics.unloaded("challenger")
        else:
            self.metrics.serving("challenger", served.about.name, served.version, served.digest)
            LOG.info("the challenger, version %s, is on trial; %s", served.version, self._guarantee())
        self.metrics.rollout(self.state, self.config.share if self.state == "canary" else 0.0)

    def _reset_evidence(self) -> None:
        self._canary = Canary(self.config.thresholds)
        self._since = datetime.now(UTC).isoformat(timespec="seconds")

    def _guarantee(self) -> str:
        """Return the scope of the significance: the evidence is in the memory of this process."""
        chance = self.config.thresholds.significance
        return (
            f"if it satisfies both thresholds, this process stops it with a probability of at most {chance:g}, in this "
            "trial against this primary; other processes decide by themselves"
        )

    def describe_rollout(self) -> dict[str, Any]:
        """Return the answer of `GET /rollout`."""
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
        """Answer one request, by `current` or by the challenger; see `Router.answer`."""
        challenger = self._challenger
        if challenger is None or self._ends_with(current):
            return await self.answer_with(current, images)
        is_in_time = DEADLINE.get() - asyncio.get_running_loop().time() >= 2 * self.config.patience_seconds
        if is_in_time and is_in_canary(request_id or secrets.token_hex(8), self.config.share):
            return await self._answer_with_challenger(images, challenger, current)
        started, num_ahead = time.perf_counter(), current.batcher.num_ahead
        answer = await self.answer_with(current, images)
        if self.config.share:
            return answer
        if self._tasks and challenger.batcher.num_ahead > num_ahead:  # it would wait longer than the primary did
            self.metrics.comparisons_dropped.inc()
        else:
            outcome = _outcome(answer.probabilities, time.perf_counter() - started)
            self._start_comparison(self._shadow(images, challenger, outcome))
        return answer

    async def _answer_with_challenger(self, images: Images, challenger: Served, current: Served) -> Answer:
        is_first = not challenger.num_answered
        challenger.num_answered += 1
        probabilities, outcome = await self._try(challenger, images)
        if outcome.error is None and self._challenger is challenger:
            if not self._start_comparison(self._compare(images, challenger, current, outcome)):
                self._add_evidence(challenger, outcome)
            return Answer(probabilities=probabilities, model=challenger, is_first=is_first)
        if outcome.error != "overloaded":
            self._add_evidence(challenger, outcome)
        self.metrics.canary_fallbacks.inc()
        return await self.answer_with(current, images)

    async def _try(self, challenger: Served, images: Images) -> tuple[Probabilities, Outcome]:
        """Ask the challenger; every failure is an outcome.

        `overloaded` is a limit of the server itself, and no evidence against the model.
        """
        started = time.perf_counter()
        probabilities = np.zeros((0, 0), np.float32)
        try:
            async with asyncio.timeout(self.config.patience_seconds):
                probabilities = await challenger.batcher.predict(images)
            outcome = _outcome(probabilities, time.perf_counter() - started)
        except TimeoutError:
            outcome = Outcome(seconds=self.config.patience_seconds, error="timeout")
        except HTTPException:
            outcome = Outcome(seconds=time.perf_counter() - started, error="overloaded")
        except Exception:
            outcome = Outcome(seconds=time.perf_counter() - started, error="failed")
            if not self._is_error_logged:
                self._is_error_logged = True
                LOG.warning("the challenger, version %s, failed", challenger.version, exc_info=True)
        if outcome.error is None:
            self.metrics.answered(
                "challenger", challenger.version, outcome.seconds, outcome.labels, outcome.confidences
            )
        elif outcome.error != "overloaded":
            self.metrics.failed("challenger", challenger.version)
        return probabilities, outcome

    async def _compare(self, images: Images, challenger: Served, current: Served, outcome: Outcome) -> None:
        """Ask the primary about images that the challenger has answered."""
        started = time.perf_counter()
        try:
            probabilities = await current.batcher.predict(images)
        except Exception:  # failures of the primary are counted only for clients
            self._add_evidence(challenger, outcome)
        else:
            self._add_evidence(challenger, outcome, _outcome(probabilities, time.perf_counter() - started))

    async def _shadow(self, images: Images, challenger: Served, primary: Outcome) -> None:
        """Ask the challenger about images that the primary has answered."""
        _, outcome = await self._try(challenger, images)
        if outcome.error == "overloaded":
            self.metrics.comparisons_dropped.inc()
        else:
            self._add_evidence(challenger, outcome, primary)

    def _start_comparison(self, comparison: Coroutine[Any, Any, None]) -> bool:
        """Run a comparison in the background; return False if too many are in progress."""
        if len(self._tasks) >= MAX_COMPARISONS:
            comparison.close()
            self.metrics.comparisons_dropped.inc()
            return False
        task = asyncio.get_running_loop().create_task(comparison)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _add_evidence(self, challenger: Served, outcome: Outcome, primary: Outcome | None = None) -> None:
        """Add one outcome, and stop the challenger if the evidence suffices."""
        if challenger is not self._challenger:  # its trial has ended
            return
        if primary and not outcome.error:
            num_agreed = sum(a == b for a, b in zip(primary.labels, outcome.labels, strict=True))
            self.metrics.compared_images.labels("agreed").inc(num_agreed)
            self.metrics.compared_images.labels("disagreed").inc(len(outcome.labels) - num_agreed)
        stopped = self._canary.observe(outcome, primary)
        if stopped is not None:
            self._challenger = None
            challenger.batcher.close()
            self.metrics.unloaded("challenger")
            self.metrics.canary_stops.labels(stopped.test).inc()
            self.metrics.rollout("stopped")
            LOG.warning("the challenger, version %s, is stopped: %s", challenger.version, stopped)

    def _ends_with(self, current: Served) -> bool:
        """Restart the trial against another primary; end it, and return True, if the challenger became the primary."""
        if current.digest == self._primary_digest or self._challenger is None:
            return False
        self._primary_digest = current.digest
        if self._challenger.digest == current.digest or not are_interchangeable(self._challenger, current):
            LOG.warning("version %s is the primary model now; the trial of %s ends", current.version, self._version)
            self.challenge(None)
            return True
        self._reset_evidence()
        return False


def are_interchangeable(first: Served, second: Served) -> bool:
    """Return whether two models take the same images, and have the same classes and the same name."""
    return (first.about.image_shape, first.about.classes, first.about.name) == (
        second.about.image_shape,
        second.about.classes,
        second.about.name,
    )


def _outcome(probabilities: Probabilities, seconds: float) -> Outcome:
    """Return the outcome of a request that was answered."""
    if not len(probabilities):
        return Outcome(seconds=seconds)
    return Outcome(
        labels=probabilities.argmax(axis=1).tolist(),
        confidences=probabilities.max(axis=1).tolist(),
        seconds=seconds,
    )
