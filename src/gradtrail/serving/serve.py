"""`gradtrail serve`: listens, loads the model, answers requests, and replaces the model when its alias moves."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from gradtrail.core.config import ConfigError
from gradtrail.serving.metrics import ServerMetrics, count_compilations
from gradtrail.serving.rollout import start
from gradtrail.serving.server.app import create_app
from gradtrail.serving.server.batching import THREAD, BatchingConfig
from gradtrail.serving.server.listening import Server, listening
from gradtrail.serving.server.middleware import LOG, TOKEN, Limits, require_token
from gradtrail.serving.server.router import Router
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.running_time import seconds_running

_SWITCH_SECONDS = 0.0005  # thread switch interval: Python's 5 ms are longer than a batch


def serve(model: str | None, place: Path, options: Mapping[str, Any]) -> int:
    """Serve an exported model until SIGTERM or Ctrl-C; return the exit status.

    Args:
        model: URI `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `models:/MODEL_ID`, or a folder with an export; None
            for the champion of the model in `params.yaml`.
        place: Folder to which a relative folder refers.
        options: The options of the command line, by their names.

    Raises:
        UserError: An option, the address or the model cannot be used; one line.
    """
    token = os.environ.get(TOKEN, "")
    require_token(options["host"], token)
    uri = _model_uri(model, place)
    try:
        rollout = start.rollout_config(options, place)
    except ValueError as error:
        raise ConfigError(f"gradtrail serve: {error}") from None
    if rollout.challenger:
        start.challenger_uri(rollout.challenger, uri)  # raises before anything is loaded

    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    LOG.setLevel(logging.INFO)
    sys.setswitchinterval(_SWITCH_SECONDS)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # another thread costs 0.1 ms per batch

    metrics = ServerMetrics()
    count_compilations(metrics, THREAD)
    router = start.make_router(rollout, BatchingConfig(max_wait_ms=options["max_wait_ms"]), metrics)
    metrics.ready.set_function(lambda: router.is_ready)
    limits = Limits(
        max_body_bytes=int(options["max_body_mib"] * 2**20),
        max_images=options["max_images"],
        max_requests=options["max_requests"],
        max_seconds=options["max_seconds"],
    )
    app = create_app(router, limits, token=token, has_access_log=options["access_log"])
    server = Server(app, router, drain_seconds=options["drain_seconds"])
    with listening(options["host"], options["port"]) as listener:
        return server.run_with(_run(uri, rollout, router, server, listener))


async def _run(uri: str, rollout: start.RolloutConfig, router: Router, server: Server, listener: socket.socket) -> None:
    """Listen, load, answer, drain; raise the error of the first model if it cannot be used."""

    def end_on_failure(loading: asyncio.Task[None]) -> None:
        if loading.cancelled() or loading.exception():
            server.should_exit = True

    loading = asyncio.create_task(_load_models(uri, rollout, router, listener))
    loading.add_done_callback(end_on_failure)
    try:
        await server.serve(sockets=[listener])
        if loading.done():
            loading.result()
    finally:
        loading.cancel()
        router.close()


async def _load_models(uri: str, rollout: start.RolloutConfig, router: Router, listener: socket.socket) -> None:
    """Load the first model, its other batch sizes, and the models that come after it."""
    host, port, *_ = listener.getsockname()
    served = await router.load(*await asyncio.to_thread(_locate, uri), all_sizes=False)
    router.swap(served)
    seconds = seconds_running()
    router.metrics.startup_seconds.set(seconds)

    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    about = (
        f"{served.about.name} version {served.version} ({served.about.model}, sha256 {served.digest[:12]}, from {uri})"
    )
    first, *others = map(str, served.about.batch_sizes)
    later = f" (compiling {', '.join(others)})" if others else ""
    print(f"{address} answers with {about}, in batches of {first}{later}; ready after {seconds:.1f} s", flush=True)

    await asyncio.gather(router.add_remaining_sizes(served), start.roll_out(uri, rollout, router, _locate))


def _locate(model: str) -> tuple[Path, str]:
    """Return the folder of a model, and its version in the registry."""
    from gradtrail.serving.registry import resolve
    from gradtrail.stages.common.setup import set_up_cache

    try:
        set_up_cache()
        reference = resolve(model)
    except OSError as error:
        reason = error.strerror or one_line(error)
        remedy = "a server writes its compilation cache and exports to .gradtrail, which must be writable"
        raise UserError(f"{error.filename or '.gradtrail'}: {reason}; {remedy}") from None
    return reference.folder, reference.version or ""


def _model_uri(model: str | None, place: Path) -> str:
    from gradtrail.serving.registry import CHAMPION, MODELS, registered_name

    if model is None:
        return f"{MODELS}{registered_name()}@{CHAMPION}"
    return model if model.startswith(MODELS) else str(place / model)
