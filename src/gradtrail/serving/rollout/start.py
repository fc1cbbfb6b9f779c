"""Starts the tasks that change the models of a running server: following aliases, and the trial of a challenger."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from gradtrail.core.config import Bounds, config
from gradtrail.serving.metrics import ServerMetrics
from gradtrail.serving.registry import MODELS, remember, version_of
from gradtrail.serving.rollout.follow import Follower
from gradtrail.serving.rollout.trial import PATIENCE_SECONDS, Trial, TrialConfig, are_interchangeable
from gradtrail.serving.server.batching import BatchingConfig
from gradtrail.serving.server.router import Router, Served
from gradtrail.serving.slo import read_slo
from gradtrail.support.errors import UserError, one_line, printable

LOG = logging.getLogger("gradtrail.serve")
Locate = Callable[[str], tuple[Path, str]]
Load = Callable[[str], Awaitable[Served]]


@config
class RolloutConfig:
    """The options of `gradtrail serve` about models to come."""

    follow_seconds: Annotated[float, Bounds(at_least=0, at_most=3600)]  # between checks of an alias; 0 for none
    challenger: str | None = None  # URI of a model on trial, or `@ALIAS` of the served model's name
    trial: TrialConfig | None = None  # how the challenger is tried

    def check(self) -> None:
        if (self.challenger is None) != (self.trial is None):
            raise ValueError("a challenger needs --canary SHARE or --shadow, and these need --challenger")


def rollout_config(options: Mapping[str, Any], place: Path) -> RolloutConfig:
    """Return the config of these options; a folder is relative to `place`.

    Raises:
        UserError: deploy/slo.yaml is needed and cannot be read.
        ValueError: The options exclude each other.
    """
    challenger, share, is_shadow = (options[name] for name in ("challenger", "canary", "shadow"))
    if share is not None and is_shadow:
        raise ValueError("--canary and --shadow exclude each other: a shadow answers no client")
    if challenger and not challenger.startswith(("@", MODELS)):
        challenger = str(place / challenger)
    trial = None
    if is_shadow or share is not None:
        patience = min(PATIENCE_SECONDS, options["max_seconds"] / 4, options["drain_seconds"] / 4)
        trial = TrialConfig(share=share or 0.0, thresholds=read_slo().canary, patience_seconds=patience)
    return RolloutConfig(follow_seconds=options["follow_seconds"], challenger=challenger, trial=trial)


def make_router(config: RolloutConfig, batching: BatchingConfig, metrics: ServerMetrics) -> Router:
    """Return a router that has a trial if there is a challenger."""
    if config.trial is None:
        return Router(batching=batching, metrics=metrics)
    return Trial(batching=batching, metrics=metrics, config=config.trial)


def split_alias(model: str) -> tuple[str, str] | None:
    """Return name and alias of `models:/NAME@ALIAS`; None for other URIs, which always refer to the same model."""
    name, separator, alias = model.removeprefix(MODELS).rpartition("@")
    return (name, alias) if separator and model.startswith(MODELS) else None


def challenger_uri(challenger: str, model: str) -> str:
    """Return a challenger's full URI: `@ALIAS` is an alias of the name of `model`.

    Raises:
        UserError: `model` is a folder, which has no name in the registry.
    """
    if not challenger.startswith("@"):
        return challenger
    if not model.startswith(MODELS):
        raise UserError(f"--challenger {challenger}: {model} is not in the registry; name the challenger in full")
    with_alias = split_alias(model)
    name = with_alias[0] if with_alias else model.removeprefix(MODELS).rpartition("/")[0]
    if not name:
        raise UserError(f"--challenger {challenger}: {model} has no name; name the challenger in full")
    return f"{MODELS}{name}{challenger}"


async def roll_out(model: str, config: RolloutConfig, router: Router, locate: Locate) -> None:
    """Try the challenger and follow aliases until cancelled; the router has its first model.

    Args:
        model: URI of the first model.
        config: The options.
        router: The router, from `make_router`.
        locate: Function that finds a model's folder and version by its URI; called in a thread.

    Raises:
        UserError: `@ALIAS` is a challenger of a model without a name; one line.
    """

    async def load(uri: str) -> Served:
        return await router.load(*await asyncio.to_thread(locate, uri))

    tasks = []
    if config.follow_seconds and (with_alias := split_alias(model)):
        tasks.append(_follow_primary(*with_alias, config.follow_seconds, router, load))
    if config.challenger and isinstance(router, Trial):
        uri = challenger_uri(config.challenger, model)
        tasks.append(_follow_challenger(uri, config.follow_seconds, router, load))
    await asyncio.gather(*tasks)


async def _follow_primary(name: str, alias: str, seconds: float, router: Router, load: Load) -> None:
    async def replace(version: str | None) -> None:
        uri = f"{MODELS}{name}/{version}"
        served, current = await load(uri), router.current
        if not are_interchangeable(served, current):
            served.batcher.close()
            difference = "takes other images, or has other classes or another name, than the model that serves"
            raise UserError(f"version {version}: {difference}; restart the server to serve it")
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember, f"{MODELS}{name}@{alias}", uri)
        router.swap(served)

    follower = Follower(
        name=name,
        alias=alias,
        role="primary",
        version=router.current.version,
        version_of=version_of,
        load=replace,
        metrics=router.metrics,
        seconds=seconds,
    )
    await follower.run()


async def _follow_challenger(uri: str, seconds: float, trial: Trial, load: Load) -> None:
    """Try a challenger, and every later version of its alias."""
    with_alias = split_alias(uri)
    if with_alias is None:
        try:
            trial.challenge(await load(uri))
        except Exception as error:
            trial.metrics.follow_failures.labels("challenger").inc()
            message = f"challenger {uri} cannot be used, so there is no trial: {one_line(error)}"
            LOG.warning("%s", printable(message), exc_info=None if isinstance(error, UserError) else error)
        return
    name, alias = with_alias

    async def challenge(version: str | None) -> None:
        trial.challenge(None if version is None else await load(f"{MODELS}{name}/{version}"))

    follower = Follower(
        name=name,
        alias=alias,
        role="challenger",
        version=None,
        version_of=version_of,
        load=challenge,
        metrics=trial.metrics,
        seconds=seconds,
    )
    await follower.step()
    if seconds:
        await follower.run()
