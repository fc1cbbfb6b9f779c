"""`gradtrail serve`: binds, loads the model beside, answers, and ends in order."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gradtrail.core.common.validation import ConfigError, check
from gradtrail.serving.monitoring.compilations import watch_compilations
from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.rollout import start
from gradtrail.serving.server.app import ROUTES, create_app
from gradtrail.serving.server.batching import THREAD, BatchingConfig
from gradtrail.serving.server.guard import LOG, TOKEN, Guard, Limits, require_token
from gradtrail.serving.server.router import Router, Served, Source
from gradtrail.serving.server.watching import MetricsWatcher
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.running_time import seconds_running
from gradtrail.support.signals import stop_request

_KEEP_ALIVE = 75  # seconds that an idle connection stays open
_BACKLOG = 2048  # connections that wait to be accepted
_LONGEST_HEAD = 2**18  # bytes of a request besides its body
_PER_PART = 32  # bytes that a part of a body may have around it, in Transfer-Encoding: chunked
_END_SECONDS = 1.0  # that threads have to end when everything is answered
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
    address = _address_of(model, place)
    if config.rollout.challenger:
        start.challenger_address(config.rollout.challenger, address)  # raises before anything is loaded
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    LOG.setLevel(logging.INFO)
    sys.setswitchinterval(_SWITCH_SECONDS)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # another thread costs a batch 0.1 ms
    with _bound(config.host, config.port) as listener:
        return _run_loop(_run(address, config, token, listener))


async def _run(model: str, config: ServerConfig, token: str, listener: socket.socket) -> int:
    """Listen, load, answer, drain."""
    metrics = ServerMetrics(ROUTES)
    watch_compilations(lambda _: metrics.compiled_in_request(), THREAD)
    router = Router(batching=config.batching, watcher=MetricsWatcher(metrics))
    guard = Guard(limits=config.limits, token=token, has_access_log=config.has_access_log)
    create_app(router, guard, metrics)
    server = _Server(guard, config, router)
    loading = asyncio.create_task(_models(model, config, router, metrics, server, _address(listener)))
    try:
        await server.serve(sockets=[listener])
        if loading.done():
            loading.result()
    finally:
        loading.cancel()
        router.close()
    return 0


async def _models(
    model: str, config: ServerConfig, router: Router, metrics: ServerMetrics, server: "_Server", address: str
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
    print(f"{address} answers with {_name(served)}, in batches of {sizes}; ready after {seconds:.1f} s", flush=True)


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


def _name(served: Served) -> str:
    return f"{served.about.name} version {served.version} ({served.about.model}, sha256 {served.digest[:12]})"


class _Server(uvicorn.Server):
    """Ends with exit status 0 after SIGTERM, once what is under way is answered."""

    def __init__(self, guard: Guard, config: ServerConfig, router: Router):
        super().__init__(
            uvicorn.Config(
                guard,
                http=_Protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=config.drain_seconds,  # type: ignore[arg-type] # seconds, in parts too
            )
        )
        self._router = router

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at the first signal in order, at the second at once."""
        with stop_request(when_asked=self._drain):
            yield

    def _drain(self) -> None:
        self._router.is_draining = True
        self.should_exit = True


class _Protocol(HttpToolsProtocol):
    """Says in JSON, too, that what came in is no HTTP; ends a connection whose head or trailers do not end.

    The parser keeps both in memory before anybody sees them. Bodies are the guard's.
    """

    _num_head = 0  # bytes of the request so far, but for its body

    def data_received(self, data: bytes) -> None:
        self._num_head += len(data)
        super().data_received(data)
        if self._num_head > _LONGEST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"the head of the request has more than {_LONGEST_HEAD:,} bytes")

    def on_body(self, body: bytes) -> None:
        self._num_head = max(0, self._num_head - len(body) - _PER_PART)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head = 0  # what the same data has of the next request is not counted
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        body = orjson.dumps({"error": msg})
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[400] + head.encode() + body)
        self.transport.close()


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens soon; a port is free at once after a server that was killed.

    Raises:
        UserError: it is in use, or the address is not of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # IDNA's for a name that can be none
        said = getattr(error, "strerror", None) or "no such address"
        raise UserError(f"--host {host} --port {port}: cannot listen there: {said}") from None
    return listener


def _address(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _run_loop(main: Coroutine[Any, Any, int]) -> int:
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # on Windows
        import uvloop

        new_event_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        threads = ThreadPoolExecutor(thread_name_prefix="serve")
        runner.get_loop().set_default_executor(threads)
        status = runner.run(main)
        threads.shutdown(wait=False, cancel_futures=True)
        _end_with_threads(status)
    return status


def _end_with_threads(status: int) -> None:
    """End the process where a thread does not: one that waits for a registry would keep it for minutes."""
    deadline = time.monotonic() + _END_SECONDS
    others = [each for each in threading.enumerate() if not (each.daemon or each is threading.current_thread())]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _address_of(model: str | None, place: Path) -> str:
    from gradtrail.serving.registry import CHAMPION, registered_name

    if model is None:
        return f"models:/{registered_name()}@{CHAMPION}"
    return model if model.startswith("models:/") else str(place / model)
