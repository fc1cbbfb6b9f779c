"""`gradtrail serve`: listens, loads the model, answers requests, and replaces the model when its alias moves."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax

from gradtrail.core.config import Bounds, ConfigError, config
from gradtrail.serving import rollout
from gradtrail.serving.monitoring.compilations import watch_compilations
from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.server.app import ROUTES, create_app
from gradtrail.serving.server.batching import THREAD, BatchingConfig
from gradtrail.serving.server.guard import LOG, TOKEN, Guard, Limits, require_token
from gradtrail.serving.server.listening import Server, address_of, listening, run_loop
from gradtrail.serving.server.router import Router, Source
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.running_time import seconds_running

_SWITCH_SECONDS = 0.0005  # thread switch interval: Python's 5 ms are longer than a batch


@config
class ServerConfig:
    """The options of `gradtrail serve`."""

    host: str  # address to listen on
    port: int  # 0 for a free one
    batching: BatchingConfig
    limits: Limits
    drain_seconds: Annotated[float, Bounds(above=0, at_most=3600)]  # grace period for running requests after SIGTERM
    has_access_log: bool  # whether each request is logged to stderr
    rollout: rollout.RolloutConfig


def server_config(place: Path, host: str, port: int, options: Mapping[str, Any]) -> ServerConfig:
    """Return the config of the command line's options, by their names; a folder is relative to `place`.

    Raises:
        ConfigError: A value is out of its bounds; one line.
    """
    try:
        Bounds(above=0, at_most=1024).check("max_body_mib", options["max_body_mib"])
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
            rollout=rollout.rollout_config(options, place),
        )
    except ValueError as error:
        raise ConfigError(f"gradtrail serve: {error}") from None


def serve(model: str | None, place: Path, config: ServerConfig) -> int:
    """Serve an exported model until SIGTERM or Ctrl-C; return the exit status.

    Args:
        model: URI `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `models:/MODEL_ID`, or a folder with an export; None
            for the champion of the model in `params.yaml`.
        place: Folder to which a relative folder refers.
        config: The options.

    Raises:
        UserError: The address or the model cannot be used; one line.
    """
    token = os.environ.get(TOKEN, "")
    require_token(config.host, token)
    uri = _model_uri(model, place)
    if config.rollout.challenger:
        rollout.challenger_uri(config.rollout.challenger, uri)  # raises before anything is loaded
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    LOG.setLevel(logging.INFO)
    sys.setswitchinterval(_SWITCH_SECONDS)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # another thread costs 0.1 ms per batch
    with listening(config.host, config.port) as listener:
        return run_loop(_run(uri, config, token, listener))


async def _run(model: str, config: ServerConfig, token: str, listener: socket.socket) -> int:
    """Listen, load, answer, drain."""
    metrics = ServerMetrics(ROUTES)
    watch_compilations(lambda _: metrics.compiled_in_request(), THREAD)
    router = rollout.make_router(config.rollout, config.batching, metrics)
    guard = Guard(limits=config.limits, token=token, has_access_log=config.has_access_log)
    create_app(router, guard)
    server = Server(guard, router, drain_seconds=config.drain_seconds)
    loading = asyncio.create_task(_load_models(model, config, router, server, address_of(listener)))
    try:
        await server.serve(sockets=[listener])
        if loading.done():
            loading.result()
    finally:
        loading.cancel()
        router.close()
    return 0


async def _load_models(model: str, config: ServerConfig, router: Router, server: Server, address: str) -> None:
    """Load the first model, and those that come after it; stop the server if the first one cannot be used."""
    try:
        await _load(model, router, address)
        await rollout.roll_out(model, config.rollout, router, _locate)
    except BaseException:
        server.should_exit = True
        raise


async def _load(model: str, router: Router, address: str) -> None:
    """Load the first model, and print its address."""
    served = await router.load(await asyncio.to_thread(_locate, model))
    router.metrics.classes = served.about.classes
    router.swap(served)
    seconds = seconds_running()
    router.metrics.ready(True, seconds=seconds)
    sizes = ", ".join(map(str, served.about.batch_sizes))
    about = f"{served.about.model}, sha256 {served.digest[:12]}, from {model}"
    answering = f"{address} answers with {served.about.name} version {served.version} ({about})"
    print(f"{answering}, in batches of {sizes}; ready after {seconds:.1f} s", flush=True)


def _locate(model: str) -> Source:
    from gradtrail.serving.registry import resolve
    from gradtrail.stages.common.setup import set_up_cache

    try:
        set_up_cache()
        reference = resolve(model)
    except OSError as error:
        reason = error.strerror or one_line(error)
        remedy = "a server writes its compilation cache and exports to .gradtrail, which must be writable"
        raise UserError(f"{error.filename or '.gradtrail'}: {reason}; {remedy}") from None
    return Source(folder=reference.folder, version=reference.version or "")


def _model_uri(model: str | None, place: Path) -> str:
    from gradtrail.serving.registry import CHAMPION, MODELS, registered_name

    if model is None:
        return f"{MODELS}{registered_name()}@{CHAMPION}"
    return model if model.startswith(MODELS) else str(place / model)
