"""`gradtrail serve`: listens, loads the model, answers requests, and replaces the model when its alias moves."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gradtrail.serving.metrics import ServerMetrics, count_compilations
from gradtrail.serving.rollout import RolloutConfig, make_router, roll_out, rollout_config
from gradtrail.serving.server.app import create_app
from gradtrail.serving.server.batching import THREAD, BatchingConfig
from gradtrail.serving.server.middleware import TOKEN, RequestLimits, error_response, require_token
from gradtrail.serving.server.router import LOG, Router
from gradtrail.stages.model.exported import read_export
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.running_time import seconds_running
from gradtrail.support.signals import stop_request

_MAX_CONNECTIONS = 512
_MAX_HEAD_BYTES = 2**16  # bytes of a request without its body
_MAX_HEADERS = 100
_MAX_PIPELINED = 64  # requests on a connection that wait for the one before them
_HEAD_SECONDS = 20.0  # longest time from a connection, or from the first byte of a request, to the end of the head
_ANSWER_SECONDS = 45.0  # longest time, after the time limit of a request, for the client to read the answer
_LAST_READS = 3  # of each connection after a signal
_CHUNK_OVERHEAD = 32  # bytes around a part of a body in Transfer-Encoding: chunked


def run_server(model: str | None, place: Path, options: Mapping[str, Any]) -> int:
    """Serve an exported model until SIGTERM or Ctrl-C, then exit with 0.

    Args:
        model: URI `models:/…`, or a folder with an export; None for the champion of the model in `params.yaml`.
        place: Folder to which a relative folder refers.
        options: The options of the command line, by their names.

    Raises:
        UserError: An option, the address or the model cannot be used; one line.
    """
    token = os.environ.get(TOKEN, "")
    require_token(options["host"], token)
    uri = _model_uri(model, place)
    rollout = rollout_config(options, uri, place)

    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    for logger in (LOG, logging.getLogger("uvicorn.access")):
        logger.setLevel(logging.INFO)
    sys.setswitchinterval(0.0005)  # of threads; Python's 5 ms are longer than a batch
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # another thread costs 0.1 ms per batch

    metrics = ServerMetrics(options["price_per_hour"])
    count_compilations(metrics, THREAD, threading.current_thread().name)
    router = make_router(rollout, BatchingConfig(max_wait_ms=options["max_wait_ms"]), metrics)
    metrics.ready.set_function(lambda: router.is_ready)
    limits = RequestLimits(
        max_body_bytes=(max_body := int(options["max_body_mib"] * 2**20)),
        max_total_bytes=max(RequestLimits.max_total_bytes, max_body),
        max_images=options["max_images"],
        max_requests=options["max_requests"],
        max_seconds=options["max_seconds"],
    )
    config = uvicorn.Config(
        create_app(router, limits, token=token),
        http=Protocol,
        ws="none",
        lifespan="off",
        access_log=options["access_log"],
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=math.ceil(options["max_seconds"] + _ANSWER_SECONDS),
        timeout_graceful_shutdown=options["drain_seconds"],
    )
    with (
        _listening(options["host"], options["port"]) as listener,
        asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
    ):
        server = Server(config)
        server.router = router
        runner.run(_run(uri, options["compiled"], rollout, server, listener))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a thread that waits for a registry would keep the process for minutes


class Server(uvicorn.Server):
    """Shuts down orderly at the first signal, immediately at the second."""

    router: Router

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with stop_request(when_asked=self._drain):
            yield

    def _drain(self) -> None:
        self.router.is_draining = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for _ in range(_LAST_READS):  # uvicorn closes idle connections without reading what was sent before the signal
            await asyncio.sleep(0.1)
        await super().shutdown(sockets)


class Protocol(HttpToolsProtocol):
    """Limits what a client without a token can hold: connections, bytes of a head, waiting requests, and time.

    The parser keeps a head and trailers in memory until they end. Errors are JSON.
    """

    _num_head = 0  # bytes of the request so far, without its body
    _timer: asyncio.TimerHandle | None = None  # ends the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        super().connection_made(transport)
        self._end_after(_HEAD_SECONDS)
        if len(self.connections) > _MAX_CONNECTIONS:
            self._refuse(503, f"{_MAX_CONNECTIONS} connections are open already; try again")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_after(None)

    def _end_after(self, seconds: float | None) -> None:
        """End the connection after some time, in place of the time that was set before."""
        if self._timer:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._num_head += len(data)
        super().data_received(data)
        if self._num_head > _MAX_HEAD_BYTES:
            self._refuse(400, f"the head of the request has more than {_MAX_HEAD_BYTES:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.cycle is None or self.cycle.response_complete:
            self._end_after(_HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            self._refuse(400, f"the request has more than {_MAX_HEADERS} headers")
            raise ValueError  # ends the parser

    def on_headers_complete(self) -> None:
        if len(self.pipeline) == _MAX_PIPELINED:
            self._refuse(400, f"{_MAX_PIPELINED} requests of this connection wait already")
            raise ValueError
        super().on_headers_complete()
        self._end_after(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._end_after(self.timeout_keep_alive)
        if self.cycle.response_complete:
            self.cycle.body.clear()  # of a request that was refused

    def on_body(self, body: bytes) -> None:
        self._num_head = max(0, self._num_head - len(body) - _CHUNK_OVERHEAD)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head = 0  # bytes of the next request in the same data are not counted
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        answer = error_response(status, message, {"Connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        self.transport.write(STATUS_LINE[status] + head + b"\r\n" + bytes(answer.body))
        self.transport.close()


async def _run(uri: str, compiled: str, rollout: RolloutConfig, server: Server, listener: socket.socket) -> None:
    """Listen, load, answer, drain; raise the error of the first model if it cannot be used."""

    def end_on_failure(loading: asyncio.Task[None]) -> None:
        if loading.cancelled() or loading.exception():
            server.should_exit = True

    loading = asyncio.create_task(_load_models(uri, compiled, rollout, server.router, listener))
    loading.add_done_callback(end_on_failure)
    await server.serve(sockets=[listener])
    if loading.done():
        loading.result()


async def _load_models(
    uri: str, compiled: str, rollout: RolloutConfig, router: Router, listener: socket.socket
) -> None:
    """Load the first model, its other batch sizes, and the models that come after it."""
    host, port, *_ = listener.getsockname()
    folder, version = await asyncio.to_thread(_locate, uri, compiled)
    if rollout.precision:
        await asyncio.to_thread(read_export, folder, rollout.precision)  # refuse one that the export lacks
    served = await router.load(folder, version, precision=rollout.primary_precision, all_sizes=False)
    router.swap(served)
    gc.freeze()  # else full collections look through all modules, for 70 ms each
    seconds = seconds_running()
    router.metrics.startup_seconds.set(seconds)

    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    about = f"({served.about.model}, sha256 {served.about.digest[:12]}, from {uri})"
    smallest, *later = map(str, served.about.batch_sizes)
    sizes = f"{smallest} (compiling {', '.join(later)})" if later else smallest
    answering = f"{address} answers with {served.about.name} version {served.version} {about}"
    print(f"{answering}, in batches of {sizes}; ready after {seconds:.1f} s", flush=True)
    await asyncio.gather(router.add_remaining_sizes(served), roll_out(uri, rollout, router, _locate))


def _listening(host: str, port: int) -> socket.socket:
    """Return a listening socket; a port is free immediately after a server was killed."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that IDNA cannot encode
        reason = getattr(error, "strerror", None) or "no such address"  # followed by the address, after a parenthesis
        raise UserError(f"--host {host} --port {port}: cannot listen there: {reason.partition(' (')[0]}") from None


def _locate(model: str, compiled: str = "") -> tuple[Path, str]:
    """Return the folder of a model, and its version in the registry; `compiled`: the digest of trusted programs."""
    from gradtrail.serving.registry import resolve
    from gradtrail.stages.common.setup import set_up_cache

    try:
        cache = set_up_cache()
        reference = resolve(model)
        if compiled:
            from gradtrail.serving.compiled import use_compiled

            use_compiled(reference.folder, compiled, cache)
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
