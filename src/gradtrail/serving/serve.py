"""`gradtrail serve`: listens, loads the model beside, answers, and lets other models come."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from gradtrail.core.common.validation import ConfigError, check
from gradtrail.serving.monitoring.compilations import watch_compilations
from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.rollout import start
from gradtrail.serving.server.app import ROUTES, create_app
from gradtrail.serving.server.batching import THREAD, BatchingConfig
from gradtrail.serving.server.guard import LOG, TOKEN, Guard, Limits, require_token
from gradtrail.serving.server.listening import Server, address_of, listening, run_loop
from gradtrail.serving.server.router import Router, Source
from gradtrail.serving.server.watching import MetricsWatcher
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.running_time import seconds_running

_SWITCH_SECONDS = 0.0005  # between the threads: Python's 5 ms are longer than a batch


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What `gradtrail serve` was told.

    Attributes:
        host: address to listen on.
        port: to listen on; 0 for a free one.
        batching: how requests are gathered.
        limits: of each request.
        drain_seconds: that requests under way have to end after SIGTERM.
        has_access_log: whether each request is a line on stderr.
        rollout: which models may replace the first one, and how.
    """

    host: str
    port: int
    batching: BatchingConfig
    limits: Limits
    drain_seconds: float
    has_access_log: bool
    rollout: start.RolloutConfig

    def __post_init__(self) -> None:
        check("drain_seconds", self.drain_seconds, above=0, at_most=3600)


def config_of(place: Path, host: str, port: int, options: Mapping[str, Any]) -> ServerConfig:
    """Return what the options of the command line say, as it names them; `place` is as of `serve`.

    Raises:
        ConfigError: a value is out of its bounds; one line.
    """
    try:
        check("max_body_mib", options["max_body_mib"], above=0, at_most=1024)
        return ServerConfig(
            host=host,
            port=port,
            batching=BatchingConfig(max_wait_ms=options["max_wait_ms"]),
            limits=Limits(
                max_body_bytes=int(options["max_body_mib"] * 2**20),
                max_images=options["max_images"],
                max_requests=options["max_requests"],
                max_seconds=options["max_seconds"],
            ),
            drain_seconds=options["drain_seconds"],
            has_access_log=options["access_log"],
            rollout=start.config_of(options, place),
        )
    except ValueError as error:
        raise ConfigError(f"gradtrail serve: {error}") from None


def serve(model: str | None, place: Path, config: ServerConfig) -> int:
    """Serve an exported model until SIGTERM or Ctrl-C; return the exit status.

    Args:
        model: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `models:/MODEL_ID`, or a folder with an export; None for
            the champion of the model that `params.yaml` names.
        place: folder that a folder is relative to.
        config: how.

    Raises:
        UserError: the address cannot be used, or the model cannot; one line.
    """
    token = os.environ.get(TOKEN, "")
    require_token(config.host, token)
    uri = _model_uri(model, place)
    if config.rollout.challenger:
        start.challenger_uri(config.rollout.challenger, uri)  # raises before anything is loaded
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    LOG.setLevel(logging.INFO)
    sys.setswitchinterval(_SWITCH_SECONDS)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # another thread costs a batch 0.1 ms
    with listening(config.host, config.port) as listener:
        return run_loop(_run(uri, config, token, listener))


async def _run(model: str, config: ServerConfig, token: str, listener: socket.socket) -> int:
    """Listen, load, answer, drain."""
    metrics = ServerMetrics(ROUTES)
    watch_compilations(lambda _: metrics.compiled_in_request(), THREAD)
    router = Router(batching=config.batching, watcher=MetricsWatcher(metrics))
    guard = Guard(limits=config.limits, token=token, has_access_log=config.has_access_log)
    create_app(router, guard, metrics)
    server = Server(guard, router, drain_seconds=config.drain_seconds)
    loading = asyncio.create_task(_models(model, config, router, metrics, server, address_of(listener)))
    try:
        await server.serve(sockets=[listener])
        if loading.done():
            loading.result()
    finally:
        loading.cancel()
        router.close()
    return 0


async def _models(
    model: str, config: ServerConfig, router: Router, metrics: ServerMetrics, server: Server, address: str
) -> None:
    """Load the first model, and those that come after it; end the server where one cannot be used."""
    try:
        await _load(model, router, metrics, address)
        await start.roll_out(model, config.rollout, router, metrics, _locate)
    except BaseException:
        server.should_exit = True
        raise


async def _load(model: str, router: Router, metrics: ServerMetrics, address: str) -> None:
    """Load the first model, and say so."""
    served = await router.load(await asyncio.to_thread(_locate, model))
    metrics.classes = served.about.classes
    router.swap(served)
    seconds = seconds_running()
    metrics.ready(True, seconds=seconds)
    sizes = ", ".join(map(str, served.about.batch_sizes))
    about = f"{served.about.model}, sha256 {served.digest[:12]}, from {model}"
    answering = f"{address} answers with {served.about.name} version {served.version} ({about})"
    print(f"{answering}, in batches of {sizes}; ready after {seconds:.1f} s", flush=True)


def _locate(model: str) -> Source:
    from gradtrail.serving.registry import resolve
    from gradtrail.stages.common.setup import set_up_cache

    try:
        set_up_cache()
        found = resolve(model)
    except OSError as error:
        what = error.strerror or one_line(error)
        kept = "a server keeps its compilation cache and exports in .gradtrail, which it must be able to write to"
        raise UserError(f"{error.filename or '.gradtrail'}: {what}; {kept}") from None
    return Source(folder=found.folder, version=found.version or "")


def _model_uri(model: str | None, place: Path) -> str:
    from gradtrail.serving.registry import CHAMPION, registered_name

    if model is None:
        return f"models:/{registered_name()}@{CHAMPION}"
    return model if model.startswith("models:/") else str(place / model)
