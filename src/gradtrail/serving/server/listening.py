"""Listening: the socket, HTTP below the application, and the event loop, which ends orderly."""

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gradtrail.serving.server.middleware import error_response
from gradtrail.serving.server.router import Router
from gradtrail.support.errors import UserError
from gradtrail.support.signals import stop_request

_MAX_HEAD_BYTES = 2**18  # bytes of a request without its body
_CHUNK_OVERHEAD = 32  # bytes around a part of a body in Transfer-Encoding: chunked
_END_SECONDS = 1.0  # grace period for threads when all requests are answered


class Server(uvicorn.Server):
    """Ends with exit status 0 after SIGTERM, once the running requests are answered."""

    def __init__(self, app: ASGIApp, router: Router, *, drain_seconds: float):
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=drain_seconds,  # type: ignore[arg-type] # fractions of seconds work too
        )
        super().__init__(config)
        self._router = router

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down orderly at the first signal, immediately at the second."""
        with stop_request(when_asked=self._drain):
            yield

    def _drain(self) -> None:
        self._router.is_draining = True
        self.should_exit = True

    def run_with(self, main: Coroutine[Any, Any, None]) -> int:
        """Run a coroutine that serves to its end, on uvloop if it is installed; return the exit status."""
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            threads = ThreadPoolExecutor(thread_name_prefix="serve")
            runner.get_loop().set_default_executor(threads)
            runner.run(main)
            threads.shutdown(wait=False, cancel_futures=True)
            _end_with_threads()
        return 0


class Protocol(HttpToolsProtocol):
    """Closes a connection whose head or trailers never end, as the parser keeps both in memory; errors are JSON."""

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
        answer = error_response(400, msg, {"Connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        self.transport.write(STATUS_LINE[400] + head + b"\r\n" + bytes(answer.body))
        self.transport.close()


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket; a port is free immediately after a server was killed.

    Raises:
        UserError: The address is in use, or not of this machine.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that IDNA cannot encode
        reason = getattr(error, "strerror", None) or "no such address"
        raise UserError(f"--host {host} --port {port}: cannot listen there: {reason}") from None


def _end_with_threads() -> None:
    """Exit if a thread does not end: one that waits for a registry would keep the process for minutes."""
    deadline = time.monotonic() + _END_SECONDS
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    threads.remove(threading.current_thread())
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
