"""The guard in front of the application: authorization, size and time limits; errors are one line of JSON.

An ASGI application around another one, short because every request passes through it.
"""

import asyncio
import hmac
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from gradtrail.core.config import Bounds, config
from gradtrail.serving.server.refusal import JSON, Refusal, busy
from gradtrail.support.errors import UserError, printable

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

LOG = logging.getLogger("gradtrail.serve")
TOKEN = "GRADTRAIL_TOKEN"  # noqa: S105 - the name of a variable
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PUBLIC = {"/", "/page.css", "/page.js", "/ping", "/v2/health/live", "/v2/health/ready"}  # no token needed
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?")  # names of this machine in a browser
_CHECKED_HEADERS = (b"host", b"origin", b"authorization", b"content-length")
_MIN_TOKEN = 16
_MAX_PATH = 2048
_MAX_BODIES = 8  # bodies of the largest size in memory at a time
DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)  # time of the event loop


@config
class Limits:
    """Limits of requests."""

    max_body_bytes: Annotated[int, Bounds(at_least=1024, at_most=2**30)] = 16 * 2**20
    max_images: Annotated[int, Bounds(at_least=1, at_most=2**20)] = 1024  # per request
    max_requests: Annotated[int, Bounds(at_least=1, at_most=2**16)] = 256  # in progress; one more is refused
    max_seconds: Annotated[float, Bounds(above=0, at_most=3600)] = 30.0  # from a request's head to its answer


def require_token(host: str, token: str) -> None:
    """Raise UserError if other machines could send requests without a token, or if the token is too short."""
    if token and (len(token) < _MIN_TOKEN or not (token.isascii() and token.isprintable()) or " " in token):
        raise UserError(f"{TOKEN}: must be at least {_MIN_TOKEN} printable ASCII characters without spaces")
    if not token and host not in LOOPBACK:
        raise UserError(
            f"--host {host}: the server could be reached from other machines; set {TOKEN} to a secret that clients send"
        )


async def _no_app(_: Scope, __: Receive, ___: Send) -> None:
    raise Refusal(404, "not found")


@dataclass(kw_only=True)
class Guard:
    """The application with its limits."""

    limits: Limits
    app: App = _no_app
    token: str = ""  # clients send it as `Authorization: Bearer …`; empty for none
    observe: Callable[[Scope, int, float], None] | None = None  # called with scope, status and seconds of a request
    has_access_log: bool = False  # whether each request is logged
    _num_requests: int = field(default=0, init=False)
    _num_bytes: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in every case."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
            return
        started = time.perf_counter()
        exchange = _Exchange(receive, send)
        try:
            await self._answer(scope, exchange)
        except Refusal as refusal:
            await exchange.refuse(refusal)
        except TimeoutError:
            await exchange.refuse(Refusal(504, f"no answer within {self.limits.max_seconds:g} s"))
        except ConnectionError:
            exchange.status = exchange.status or 499  # the client disconnected
        except Exception:
            LOG.exception("%s %s failed", scope["method"], _as_line(scope["path"]))
            await exchange.refuse(Refusal(500, "the server failed; its log says why"))
        seconds = time.perf_counter() - started
        if self.observe:
            self.observe(scope, exchange.status, seconds)
        if self.has_access_log:
            LOG.info("%s %s %d %.1f ms", scope["method"], _as_line(scope["path"]), exchange.status, 1000 * seconds)

    async def _answer(self, scope: Scope, exchange: "_Exchange") -> None:
        headers = _headers(scope["headers"])
        if len(scope["path"]) > _MAX_PATH:
            raise Refusal(414, f"the path has more than {_MAX_PATH} characters")
        if self.token:
            self._check_token(scope["path"], headers)
        else:
            _check_own_page(headers)
        if scope["method"] in ("GET", "HEAD"):
            await self.app(scope, exchange.receive, exchange.send)
            return
        _check_length(headers, self.limits.max_body_bytes)
        if self._num_requests >= self.limits.max_requests:
            raise busy(f"{self._num_requests} requests are in progress already; try again")
        self._num_requests += 1
        try:
            async with asyncio.timeout(self.limits.max_seconds) as timeout:
                DEADLINE.set(timeout.when() or math.inf)
                await self._read_body(exchange)
                await self.app(scope, exchange.receive, exchange.send)
        finally:
            self._num_requests -= 1
            self._num_bytes -= exchange.num_bytes

    async def _read_body(self, exchange: "_Exchange") -> None:
        """Read the whole body; the application gets it in one piece."""
        parts, is_complete = list[bytes](), False
        while not is_complete:
            part, is_complete = await exchange.read()
            self._num_bytes += len(part)
            if exchange.num_bytes > self.limits.max_body_bytes:
                raise _too_large(self.limits.max_body_bytes)
            if self._num_bytes > _MAX_BODIES * self.limits.max_body_bytes:
                raise busy("the bodies of other requests use all memory for bodies; try again")
            parts.append(part)
        exchange.body = b"".join(parts)

    def _check_token(self, path: str, headers: dict[bytes, bytes]) -> None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        is_valid = hmac.compare_digest(token.strip(), self.token.encode()) and scheme.lower() == b"bearer"
        if not is_valid and path not in _PUBLIC:
            raise Refusal(401, "a token is needed: Authorization: Bearer …", {"WWW-Authenticate": "Bearer"})


def _headers(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by name; refuse a request with two checked headers of one name, as proxies use the first."""
    names = [name for name, _ in headers]
    for name in _CHECKED_HEADERS:
        if (count := names.count(name)) > 1:
            raise Refusal(400, f"{name.decode().title()}: must be sent once, got {count} such headers")
    return dict(headers)


def _as_line(path: str) -> str:
    """Return a path without line breaks, which clients can put into it."""
    return printable(path[:_MAX_PATH]).replace("\n", "\\n")


def _check_own_page(headers: dict[bytes, bytes]) -> None:
    """Refuse requests of other pages: of a name that was rebound to this machine, or of another origin."""
    host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
    if not _OWN_HOST.fullmatch(host):
        raise Refusal(421, f"Host: must be this machine, such as localhost, unless {TOKEN} is set")
    if origin and origin != f"http://{host}":
        raise Refusal(403, f"Origin: cross-origin requests are refused unless {TOKEN} is set")


def _check_length(headers: dict[bytes, bytes], limit: int) -> None:
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > 18:
        raise Refusal(400, "Content-Length: must be a number")
    if int(length) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"the body has more than {limit:,} bytes", {"Connection": "close"})


class _Exchange:
    """One request and its answer: passes the body on, and records the status."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.num_bytes = self.status = 0
        self.body: bytes | None = None

    async def read(self) -> tuple[bytes, bool]:
        """Return the next part of the body, and whether it is the last."""
        message = await self._receive()
        if message["type"] != "http.request":
            raise ConnectionResetError
        part: bytes = message.get("body", b"")
        self.num_bytes += len(part)
        return part, not message.get("more_body", False)

    async def receive(self) -> Message:
        """Return the body in one piece, then later messages."""
        if self.body is None:
            return await self._receive()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error, unless an answer has started."""
        if self.status:
            return
        self.status, body = refusal.status, refusal.body
        headers = {"Content-Type": JSON, "Content-Length": str(len(body)), **refusal.headers}
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
        await self._send({"type": "http.response.body", "body": body})
