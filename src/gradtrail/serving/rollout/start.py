"""Starts what changes the models of a running server: following the registry's aliases, and a challenger's trial."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.core.common.validation import check
from gradtrail.serving.monitoring.metrics import Role, ServerMetrics
from gradtrail.serving.registry import remember, version_of
from gradtrail.serving.rollout.follow import Follower, Take
from gradtrail.serving.rollout.trial import PATIENCE_SECONDS, Trial, TrialConfig, fit
from gradtrail.serving.server.router import Router, Served, Source
from gradtrail.serving.slo import read_slo
from gradtrail.support.errors import UserError, one_line, printable

LOG = logging.getLogger("gradtrail.serve")
_MODELS = "models:/"
Locate = Callable[[str], Source]
Load = Callable[[str], Awaitable[Served]]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What `gradtrail serve` was told of models to come.

    Attributes:
        follow_seconds: between looks at an alias; 0 for never.
        challenger: URI of a model on trial, `@ALIAS` of the served model's name among them; None for none.
        trial: how it is tried; None where there is none.
    """

    follow_seconds: float
    challenger: str | None = None
    trial: TrialConfig | None = None

    def __post_init__(self) -> None:
        check("follow_seconds", self.follow_seconds, at_least=0, at_most=3600)
        if (self.challenger is None) != (self.trial is None):
            raise ValueError("a challenger needs --canary SHARE or --shadow, and these need --challenger")


def config_of(options: Mapping[str, Any], place: Path) -> RolloutConfig:
    """Return what the options of the command line say; `place` is the folder that a folder is relative to.

    Raises:
        UserError: deploy/slo.yaml is needed and cannot be read.
        ValueError: the options do not fit together.
    """
    challenger, share, is_shadow = (options[name] for name in ("challenger", "canary", "shadow"))
    if share is not None and is_shadow:
        raise ValueError("--canary and --shadow exclude each other: a shadow answers nobody")
    if challenger and not challenger.startswith(("@", _MODELS)):
        challenger = str(place / challenger)
    is_tried = is_shadow or share is not None
    patience = min(PATIENCE_SECONDS, options["max_seconds"] / 4, options["drain_seconds"] / 4)
    trial = TrialConfig(share=share or 0.0, limits=read_slo().canary, patience_seconds=patience) if is_tried else None
    return RolloutConfig(follow_seconds=options["follow_seconds"], challenger=challenger, trial=trial)


def alias_of(model: str) -> tuple[str, str] | None:
    """Return name and alias of `models:/NAME@ALIAS`; None for other URIs, which always mean the same model."""
    name, at, alias = model.removeprefix(_MODELS).rpartition("@")
    return (name, alias) if at and model.startswith(_MODELS) else None


def challenger_uri(challenger: str, model: str) -> str:
    """Return a challenger's whole URI: `@ALIAS` is one of the name that `model` has.

    Raises:
        UserError: `model` is a folder, which has no name in the registry.
    """
    if not challenger.startswith("@"):
        return challenger
    if not model.startswith(_MODELS):
        raise UserError(f"--challenger {challenger}: {model} is not in the registry; name the challenger in full")
    followed = alias_of(model)
    name = followed[0] if followed else model.removeprefix(_MODELS).rpartition("/")[0]
    if not name:
        raise UserError(f"--challenger {challenger}: {model} has no name; name the challenger in full")
    return f"{_MODELS}{name}{challenger}"


async def roll_out(model: str, config: RolloutConfig, router: Router, metrics: ServerMetrics, locate: Locate) -> None:
    """Try the challenger and follow aliases until cancelled; the router has its first model.

    Args:
        model: URI of the first model.
        config: what to do.
        router: whose models are replaced.
        metrics: that are told.
        locate: finds a model's folder by its URI, in a thread.

    Raises:
        UserError: `@ALIAS` names a challenger of a model without a name; one line.
    """
    running = []
    if config.follow_seconds and (followed := alias_of(model)):
        running.append(_follow_primary(followed, config, router, metrics, locate))
    if config.challenger and config.trial:
        trial = Trial(config.trial, router, metrics)
        router.rollout = trial
        uri = challenger_uri(config.challenger, model)
        running.append(_follow_challenger(uri, config, trial, metrics, _loader(router, locate)))
    await asyncio.gather(*running)


async def _follow_primary(
    followed: tuple[str, str], config: RolloutConfig, router: Router, metrics: ServerMetrics, locate: Locate
) -> None:
    load = _loader(router, locate)
    name, alias = followed

    async def promote(version: str | None) -> None:
        uri = f"{_MODELS}{name}/{version}"
        served, current = await load(uri), router.current
        if not fit(served, current):
            served.batcher.close()
            unlike = "takes other images, or has other classes or another name, than the model that serves"
            raise UserError(f"version {version}: {unlike}; restart the server to serve it")
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember, f"{_MODELS}{name}@{alias}", uri)
        metrics.classes = served.about.classes
        router.swap(served)

    known = router.current.version
    await _follower(followed, "primary", known, promote, metrics, config.follow_seconds).run()


async def _follow_challenger(uri: str, config: RolloutConfig, trial: Trial, metrics: ServerMetrics, load: Load) -> None:
    """Try a challenger, and every next one that its alias names."""
    followed = alias_of(uri)
    if followed is None:
        try:
            trial.challenge(await load(uri))
        except Exception as error:
            metrics.follow_failed("challenger")
            said = f"challenger {uri} cannot be used, none is tried: {one_line(error)}"
            LOG.warning("%s", printable(said), exc_info=None if isinstance(error, UserError) else error)
        return
    name = followed[0]

    async def challenge(version: str | None) -> None:
        trial.challenge(None if version is None else await load(f"{_MODELS}{name}/{version}"))

    follower = _follower(followed, "challenger", None, challenge, metrics, config.follow_seconds)
    await follower.step()
    if config.follow_seconds:
        await follower.run()


def _loader(router: Router, locate: Locate) -> Load:
    async def load(uri: str) -> Served:
        return await router.load(await asyncio.to_thread(locate, uri))

    return load


def _follower(
    followed: tuple[str, str],
    role: Role,
    known: str | None,
    take: Take,
    metrics: ServerMetrics,
    seconds: float,
) -> Follower:
    name, alias = followed
    return Follower(
        name=name,
        alias=alias,
        role=role,
        known=known,
        version_of=version_of,
        take=take,
        metrics=metrics,
        seconds=seconds,
    )
