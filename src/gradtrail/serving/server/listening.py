"""Listening: the socket, HTTP below the guard, the event loop, and an orderly shutdown."""

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gradtrail.serving.server.guard import Guard
from gradtrail.serving.server.router import Router
from gradtrail.support.errors import UserError
from gradtrail.support.signals import stop_request

_KEEP_ALIVE = 75  # seconds that an idle connection stays open
_BACKLOG = 2048  # connections waiting to be accepted
_MAX_HEAD_BYTES = 2**18  # bytes of a request without its body
_CHUNK_OVERHEAD = 32  # bytes around a part of a body in Transfer-Encoding: chunked
_END_SECONDS = 1.0  # grace period for threads when all requests are answered


class Server(uvicorn.Server):
    """Ends with exit status 0 after SIGTERM, once the running requests are answered.

    Args:
        guard: The application.
        router: The router, whose `is_draining` is set.
        drain_seconds: Grace period for running requests after SIGTERM.
    """

    def __init__(self, guard: Guard, router: Router, *, drain_seconds: float):
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
                timeout_graceful_shutdown=drain_seconds,  # type: ignore[arg-type] # fractions of seconds work too
            )
        )
        self._router = router

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down orderly at the first signal, immediately at the second."""
        with stop_request(when_asked=self._drain):
            yield

    def _drain(self) -> None:
        self._router.is_draining = True
        self.should_exit = True


class _Protocol(HttpToolsProtocol):
    """Reports invalid HTTP in JSON; closes a connection whose head or trailers are too long.

    The parser keeps both in memory until they are complete. The guard limits bodies.
    """

    _num_head = 0  # bytes of the request so far, without its body

    def data_received(self, data: bytes) -> None:
        self._num_head += len(data)
        super().data_received(data)
        if self._num_head > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the head of the request has more than {_MAX_HEAD_BYTES:,} bytes")

    def on_body(self, body: bytes) -> None:
        self._num_head = max(0, self._num_head - len(body) - _CHUNK_OVERHEAD)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head = 0  # bytes of the next request in the same data are not counted
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        body = orjson.dumps({"error": msg})
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[400] + head.encode() + body)
        self.transport.close()


def listening(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; a port is free immediately after a server was killed.

    Raises:
        UserError: The address is in use, or not of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that IDNA cannot encode
        reason = getattr(error, "strerror", None) or "no such address"
        raise UserError(f"--host {host} --port {port}: cannot listen there: {reason}") from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL at which a bound socket answers."""
    host, port, *_ = listener.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine to its end, on uvloop if it is installed; return the exit status, or exit with it."""
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
    """Exit if a thread does not end: one that waits for a registry would keep the process for minutes."""
    deadline = time.monotonic() + _END_SECONDS
    current = threading.current_thread()
    threads = [thread for thread in threading.enumerate() if not (thread.daemon or thread is current)]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
