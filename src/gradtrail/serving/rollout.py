"""Replaces the model of a running server when an alias moves, and tries a challenger as shadow or canary.

- **Canary**: ids in the share get the challenger's answer. The primary model answers the same images afterwards,
  without the client waiting for it, so that the labels can be compared. If the challenger fails or hangs, the primary
  answers, and no client notices.
- **Shadow**: every client gets the primary's answer; the challenger answers the same images afterwards.

Out of scope: latency, which depends on the load of the trial itself (an alert compares `gradtrail_model_seconds` by
role), and the shares of the predicted classes, which differ if the clients of the two models differ.
"""

import asyncio
import contextlib
import functools
import hashlib
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from gradtrail.serving.metrics import Role, Rollout, ServerMetrics
from gradtrail.serving.registry import MODELS, RegistryUnavailable, remember, version_of
from gradtrail.serving.sequential import MeanTest
from gradtrail.serving.server.batching import BatchingConfig, Images, Probabilities
from gradtrail.serving.server.middleware import DEADLINE
from gradtrail.serving.server.router import LOG, Answer, Router, Served
from gradtrail.serving.slo import CanaryThresholds, read_slo
from gradtrail.support.errors import UserError, one_line, printable

MAX_COMPARISONS = 16  # in progress
PATIENCE_SECONDS = 2.0  # longest wait for the challenger's answer; then the primary answers
MAX_BACKOFF_SECONDS = 60.0  # between attempts to load a version that could not be loaded


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The options of `gradtrail serve` about models to come."""

    follow_seconds: float  # between checks of an alias; 0 for none
    challenger: str | None = None  # URI of a model on trial
    precision: str = ""  # of the challenger, with the weights of the primary model; without a challenger, of the latter
    share: float = 0.0  # share of the ids that the challenger answers; 0 for a shadow
    patience_seconds: float = PATIENCE_SECONDS  # longest wait for the challenger's answer

    @property
    def primary_precision(self) -> str:
        """The precision of the primary model; empty for that of its training."""
        return "" if self.challenger else self.precision


def rollout_config(options: Mapping[str, Any], uri: str, place: Path) -> RolloutConfig:
    """Return the config of these options; raise UserError if they exclude each other.

    A challenger `@ALIAS` is an alias of the registered name of the served model, at `uri`; folders are relative to
    `place`.
    """
    challenger, share, is_shadow, precision = (
        options[name] for name in ("challenger", "canary", "shadow", "precision")
    )
    is_trial = is_shadow or share is not None
    if challenger and precision:
        raise UserError("--precision and --challenger exclude each other: a challenger may differ in one respect")
    if share is not None and is_shadow:
        raise UserError("--canary and --shadow exclude each other: a shadow answers no client")
    if bool(challenger) != is_trial and not precision:
        raise UserError("a challenger needs --canary SHARE or --shadow, and these need --challenger or --precision")
    if challenger and challenger.startswith("@"):
        match = re.fullmatch(f"({MODELS}[^/@]+)[/@].+", uri)
        if match is None:
            raise UserError(f"--challenger {challenger}: {uri} is not in the registry; name the challenger in full")
        challenger = match[1] + challenger
    elif challenger and not challenger.startswith(MODELS):
        challenger = str(place / challenger)
    return RolloutConfig(
        follow_seconds=options["follow_seconds"],
        challenger=uri if precision and is_trial else challenger,
        precision=precision or "",
        share=share or 0.0,
        patience_seconds=min(PATIENCE_SECONDS, options["max_seconds"] / 4, options["drain_seconds"] / 4),
    )


def make_router(config: RolloutConfig, batching: BatchingConfig, metrics: ServerMetrics) -> Router:
    """Return a router, with a trial if there is a challenger; UserError if deploy/slo.yaml cannot be read then."""
    if config.challenger is None:
        return Router(batching=batching, metrics=metrics)
    return TrialRouter(batching=batching, metrics=metrics, config=config, evidence=Evidence(read_slo().canary))


async def roll_out(uri: str, config: RolloutConfig, router: Router, locate: Callable[[str], tuple[Path, str]]) -> None:
    """Try the challenger and follow the aliases until cancelled; the router has its first model."""

    async def load(uri: str, precision: str) -> Served:
        return await router.load(*await asyncio.to_thread(locate, uri), precision=precision)

    def replace(served: Served | None) -> None:
        if served is None:
            raise UserError("the registry has no such alias")
        require_same_inputs(served, router.current, "; restart the server to serve it")
        router.swap(served)

    follow = functools.partial(Follower, metrics=router.metrics, seconds=config.follow_seconds)
    followers = []
    if config.follow_seconds and (name := _split_alias(uri)):
        precision = config.primary_precision
        first = f"{MODELS}{name[0]}/{router.current.version.removesuffix(f'-{precision}')}"
        load_primary = functools.partial(load, precision=precision)
        followers.append(follow(uri=uri, role="primary", load=load_primary, use=replace, loaded=first).run())
    if config.challenger and isinstance(router, TrialRouter):
        load_challenger = functools.partial(load, precision=config.precision)
        challenger = follow(uri=config.challenger, role="challenger", load=load_challenger, use=router.challenge)
        followers.append(challenger.run())
    await asyncio.gather(*followers)


def require_same_inputs(served: Served, current: Served, remedy: str = "") -> None:
    """Close the model and raise UserError unless its image size, classes and name are those of the current one."""
    about, other = served.about, current.about
    if (about.image_shape, about.classes, about.name) != (other.image_shape, other.classes, other.name):
        served.batcher.close()
        difference = "takes other images, or has other classes or another name, than the model that serves"
        raise UserError(f"version {served.version} {difference}{remedy}")


@dataclass(kw_only=True)
class Follower:
    """Loads the model of a URI, and each later version of its alias; a failure is logged once, and tried again."""

    uri: str
    role: Role
    load: Callable[[str], Awaitable[Served]]  # loads the model of a URI and warms it up
    use: Callable[[Served | None], None]  # lets it serve; None if there is no such alias
    metrics: ServerMetrics
    seconds: float  # between two questions; 0 to ask once
    loaded: str | None = None  # URI of the version in use
    _problem: str = ""  # logged last; empty after a success
    _backoff: float = 0.0

    async def run(self) -> None:
        """Follow the alias until cancelled."""
        await self.step()
        while self.seconds:
            spread = random.uniform(0.8, 1.2)  # noqa: S311 - so that servers started together do not ask together
            await asyncio.sleep(max(self.seconds, self._backoff) * spread)
            await self.step()

    async def step(self) -> None:
        """Ask for the version of the alias, and load it if it is a new one."""
        uri, problem, bug = self.uri, "", None
        try:
            if name := _split_alias(self.uri):
                version = await asyncio.to_thread(version_of, *name)
                self.metrics.registry_up.set(1)
                uri = f"{MODELS}{name[0]}/{version}" if version else ""
            if (uri or None) != self.loaded:
                self.use(await self.load(uri) if uri else None)
                self.loaded = uri or None
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(remember, self.uri, uri)
            self._backoff = 0.0
        except RegistryUnavailable as error:
            self.metrics.registry_up.set(0)
            problem = one_line(error)
        except Exception as error:
            self.metrics.follow_failures.labels(self.role).inc()
            self._backoff = min(MAX_BACKOFF_SECONDS, 2 * max(self.seconds, self._backoff))
            problem, bug = one_line(error), None if isinstance(error, UserError) else error
        if problem:
            problem = f"{uri or self.uri} cannot be loaded, the {self.role} is still {self.loaded or 'none'}: {problem}"
        if problem != self._problem:
            LOG.warning("%s", printable(problem or f"{self.uri} can be loaded again"), exc_info=bug)
            self._problem = problem


def _split_alias(uri: str) -> tuple[str, str] | None:
    """Return name and alias of `models:/NAME@ALIAS`; None for other URIs, which always refer to the same model."""
    match = re.fullmatch(f"{MODELS}([^/@]+)@(.+)", uri)
    return (match[1], match[2]) if match else None


class Evidence:
    """Evidence about a challenger, compared with one primary model.

    Two tests, of the errors and of the agreement, are valid at any time, each at half of the significance: a challenger
    within both thresholds is stopped with a probability of at most `significance`, over any number of requests.
    """

    def __init__(self, thresholds: CanaryThresholds, challenger: Served | None = None) -> None:
        self.thresholds = thresholds
        self.challenger = challenger  # None for no trial, and once it is stopped
        self.version = challenger.version if challenger else None
        self.since = datetime.now(UTC).isoformat(timespec="seconds")
        self.requests = 0  # that the challenger answered or failed to answer
        self.stopped: dict[str, str] | None = None  # test and message
        self.has_logged_exception = False
        self._errors = MeanTest(thresholds.max_error_rate, thresholds.significance / 2)
        self._disagreement = MeanTest(1 - thresholds.min_agreement, thresholds.significance / 2)

    def add_request(self, *, has_failed: bool) -> None:
        """Add a request that the challenger answered, or failed to answer."""
        self.requests += 1
        if self._errors.observe(float(has_failed)):
            share, limit = self._errors.mean, self.thresholds.max_error_rate
            self._stop("errors", f"{share:.1%} of its requests failed; the limit is {limit:.1%}")

    def add_comparison(self, agreement: float) -> None:
        """Add the share of a request's images that got the same label; a request is one observation."""
        if self._disagreement.observe(1 - agreement) and self.requests >= self.thresholds.min_requests:
            share, limit = 1 - self._disagreement.mean, self.thresholds.min_agreement
            self._stop("agreement", f"{share:.1%} of its labels are the primary's; the limit is {limit:.1%}")

    def _stop(self, test: str, reason: str) -> None:
        message = f"{reason} (after {self.requests} requests to this process)"
        self.stopped = self.stopped or {"because": test, "message": message}


def is_in_canary(request_id: str, share: float) -> bool:
    """Return whether an id is in the share: the same ids in every process, and all ids of a smaller share."""
    digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@dataclass(kw_only=True)
class TrialRouter(Router):
    """A router that lets a challenger answer some requests, or none, and stops it beyond its thresholds."""

    config: RolloutConfig
    evidence: Evidence  # of the current trial
    _comparisons: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    @property
    def state(self) -> Rollout:
        """The state of the trial."""
        if self.evidence.stopped:
            return "stopped"
        if self.evidence.challenger is None:
            return "off"
        return "canary" if self.config.share else "shadow"

    def describe_rollout(self) -> dict[str, Any]:
        """Return the answer of `GET /rollout`."""
        evidence = self.evidence
        return {
            "state": self.state,
            "challenger": evidence.version,
            "share": self.config.share if evidence.challenger else 0.0,
            "requests": evidence.requests,
            "since": evidence.since,
            "stopped": evidence.stopped,
        }

    def challenge(self, served: Served | None) -> None:
        """Start the trial of this model without evidence; None ends the trial."""
        if served is not None:
            require_same_inputs(served, self.current)
            served.batcher.short_sizes.clear()  # in the event loop, it could keep the primary from answering
        if self.evidence.challenger is not None:
            self.evidence.challenger.batcher.close()
        self.evidence = Evidence(self.evidence.thresholds, served)
        if served is None:
            self.metrics.unloaded("challenger")
        else:
            self.metrics.serving("challenger", served.about.name, served.version, served.about.digest)
            LOG.info("the challenger, version %s, is on trial", served.version)
        self.metrics.rollout(self.state, self.config.share if served else 0.0)

    def swap(self, served: Served) -> None:
        """Replace the primary model; the trial begins again, or ends if the challenger is now the primary."""
        super().swap(served)
        challenger = self.evidence.challenger
        if challenger is not None and challenger.about.digest == served.about.digest and not self.config.precision:
            LOG.warning("the challenger, version %s, is the primary model now; its trial ends", challenger.version)
            self.challenge(None)
        elif challenger is not None:
            self.evidence = Evidence(self.evidence.thresholds, challenger)

    async def answer(self, images: Images, request_id: str | None, current: Served) -> Answer:
        """Answer one request, by `current` or by the challenger; see `Router.answer`."""
        evidence, challenger = self.evidence, self.evidence.challenger
        if challenger is None or current is not self.current or not len(images):
            return await self.answer_with(current, images)
        if self.config.precision and challenger.about.digest != current.about.digest:  # one of them is loaded first
            return await self.answer_with(current, images)

        # A shadow: the primary answers.
        if not self.config.share:
            answer = await self.answer_with(current, images)
            self._compare_later(evidence, images, answer.probabilities, challenger)
            return answer

        # A canary: the challenger answers the ids in the share, if the client's time allows for the primary afterwards.
        has_time = DEADLINE.get() - asyncio.get_running_loop().time() >= 2 * self.config.patience_seconds
        if not has_time or not is_in_canary(request_id or secrets.token_hex(8), self.config.share):
            return await self.answer_with(current, images)
        probabilities = await self._try(evidence, challenger, images)
        if probabilities is None:
            self.metrics.canary_fallbacks.inc()
            return await self.answer_with(current, images)
        self._compare_later(evidence, images, probabilities, current)
        challenger.num_answered += 1
        return Answer(probabilities=probabilities, model=challenger, is_first=challenger.num_answered == 1)

    async def _try(self, evidence: Evidence, challenger: Served, images: Images) -> Probabilities | None:
        """Ask the challenger; None if it fails or hangs, or if the server is overloaded, which is no evidence."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.config.patience_seconds):
                probabilities = await challenger.batcher.predict(images)
        except Exception as error:
            # A request that waits for others, in batches that take little time, meets a busy server, not a fault
            is_short = challenger.batcher.running_seconds < self.config.patience_seconds / 2
            if isinstance(error, HTTPException) or (isinstance(error, TimeoutError) and is_short):
                self.metrics.comparisons_dropped.inc()
                return None
            if not isinstance(error, TimeoutError) and not evidence.has_logged_exception:
                evidence.has_logged_exception = True
                LOG.warning("the challenger, version %s, failed", challenger.version, exc_info=True)
            self.metrics.failed("challenger", challenger.version, error)
            evidence.add_request(has_failed=True)
            self._stop_if_proven(evidence)
            return None
        labels, confidences = probabilities.argmax(axis=1).tolist(), probabilities.max(axis=1).tolist()
        self.metrics.answered("challenger", challenger.version, time.perf_counter() - started, labels, confidences)
        evidence.add_request(has_failed=False)
        return probabilities

    def _compare_later(self, evidence: Evidence, images: Images, probabilities: Probabilities, other: Served) -> None:
        """Compare an answer with the other model's in the background, unless too many comparisons are in progress."""
        if len(self._comparisons) >= MAX_COMPARISONS:
            self.metrics.comparisons_dropped.inc()
            return
        task = asyncio.create_task(self._compare(evidence, images, probabilities, other))
        self._comparisons.add(task)
        task.add_done_callback(self._comparisons.discard)

    async def _compare(self, evidence: Evidence, images: Images, first: Probabilities, other: Served) -> None:
        try:
            second = await (other.batcher.predict(images) if self.config.share else self._try(evidence, other, images))
        except Exception:  # failures of the primary are counted only for clients
            return
        if second is None:
            return
        num_agreed = int((first.argmax(axis=1) == second.argmax(axis=1)).sum())
        self.metrics.compared_images.labels("agreed").inc(num_agreed)
        self.metrics.compared_images.labels("disagreed").inc(len(images) - num_agreed)
        evidence.add_comparison(num_agreed / len(images))
        self._stop_if_proven(evidence)

    def _stop_if_proven(self, evidence: Evidence) -> None:
        """Stop the challenger if the evidence suffices, once; evidence of an earlier trial stops nothing."""
        if evidence.stopped and evidence is self.evidence and evidence.challenger is not None:
            evidence.challenger.batcher.close()
            evidence.challenger = None
            self.metrics.unloaded("challenger")
            self.metrics.canary_stops.labels(evidence.stopped["because"]).inc()
            self.metrics.rollout(self.state)
            LOG.warning("the challenger, version %s, is stopped: %s", evidence.version, evidence.stopped["message"])
