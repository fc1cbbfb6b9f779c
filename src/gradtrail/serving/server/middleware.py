"""What a request passes before an endpoint answers it: counts, authorization, and limits of memory and time.

Errors are `{"error": "one line"}`, without a path or a traceback.
"""

import asyncio
import hmac
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradtrail.serving.metrics import Temperature
from gradtrail.serving.server.router import Router
from gradtrail.support.errors import UserError, one_line, printable

JSON = "application/json"
TOKEN = "GRADTRAIL_TOKEN"  # noqa: S105 - the name of a variable
DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)  # of the current request, by the loop's clock
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?")  # names of this machine in a browser
_PUBLIC = {"/", "/page.css", "/page.js", "/ping", "/v2/health/live", "/v2/health/ready"}  # no token needed
_MIN_TOKEN = 16
_MAX_ERROR = 300  # characters
_UNIQUE = (b"host", b"origin", b"authorization")  # headers that decide who the client is


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of requests, for all clients together."""

    max_body_bytes: int = 16 * 2**20
    max_total_bytes: int = 128 * 2**20  # of the bodies of all requests in progress
    max_images: int = 1024  # per request
    max_requests: int = 256  # in progress; one more is refused
    max_seconds: float = 30.0  # from a request's head to its answer


def require_token(host: str, token: str) -> None:
    """Raise UserError if other machines could send requests without a token, or if the token is too short."""
    if token and (len(token) < _MIN_TOKEN or not (token.isascii() and token.isprintable()) or " " in token):
        raise UserError(f"{TOKEN}: must be at least {_MIN_TOKEN} printable ASCII characters without spaces")
    if not token and host not in _LOOPBACK:
        raise UserError(
            f"--host {host}: the server could be reached from other machines; set {TOKEN} to a secret that clients send"
        )


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error; one that may be tried again says when."""
    retry = {"Retry-After": "1"} if status in (429, 503) else {}
    body = orjson.dumps({"error": printable(one_line(message))[:_MAX_ERROR]})
    return Response(body, status, {**(headers or {}), **retry}, JSON)


class CountRequests:
    """Counts each request by route, status and outcome; once the server drains, its answer ends the connection."""

    def __init__(self, app: ASGIApp, router: Router) -> None:
        self.app, self.router, self.metrics = app, router, router.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        started, status = time.perf_counter(), 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.router.is_draining:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")
            temperature: Temperature = "cold" if scope.get("gradtrail.is_first") else "warm"
            self.metrics.request_seconds.labels(route, str(status), temperature).observe(seconds)
            if scope["method"] == "POST":  # of the endpoints that classify
                self.metrics.count_request(status, seconds, temperature)


class CheckClient:
    """Refuses requests without the token; if there is none, requests of websites that are visited on this machine.

    Those have another `Origin`, or, if the website rebinds its own name to 127.0.0.1, another `Host`.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        refusal = self._refusal(scope)
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, names = dict(scope["headers"]), [name for name, _ in scope["headers"]]
        for name in _UNIQUE:
            if names.count(name) > 1:  # else the last one would decide, and for a proxy perhaps the first one
                return error_response(400, f"{name.decode().title()}: sent {names.count(name)} times; send it once")
        if self.token:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            is_valid = hmac.compare_digest(token.strip(), self.token) and scheme.lower() == b"bearer"
            if not is_valid and scope["path"] not in _PUBLIC:
                message = "a token is needed: Authorization: Bearer …"
                return error_response(401, message, {"WWW-Authenticate": "Bearer"})
            return None
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        if not _OWN_HOST.fullmatch(host):
            return error_response(421, f"Host: must be this machine, such as localhost, unless {TOKEN} is set")
        if origin and origin != f"http://{host}":
            return error_response(403, f"Origin: cross-origin requests are refused unless {TOKEN} is set")
        return None


class Limiter:
    """Limits the number of requests in progress, their time, and the bytes of each body and of all bodies together."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self._num_requests = 0  # in progress
        self._num_bytes = 0  # of their bodies, received so far

    def apply(self, endpoint: Callable[[Request, bytearray], Awaitable[Response]]) -> Callable[[Request], Any]:
        """Return an endpoint that reads the body, and calls this one with it."""

        async def limited(request: Request) -> Response:
            if self._num_requests >= self.limits.max_requests:
                raise HTTPException(429, f"{self._num_requests} requests are in progress already; try again")
            self._num_requests += 1
            body = bytearray()
            try:
                async with asyncio.timeout(self.limits.max_seconds) as timeout:
                    DEADLINE.set(timeout.when() or math.inf)
                    async for part in request.stream():
                        if len(body) + len(part) > (limit := self.limits.max_body_bytes):
                            raise HTTPException(413, f"the body has more than {limit:,} bytes", {"Connection": "close"})
                        if self._num_bytes + len(part) > (limit := self.limits.max_total_bytes):
                            raise HTTPException(429, f"bodies of {limit:,} bytes are in progress already; try again")
                        body += part
                        self._num_bytes += len(part)
                    return await endpoint(request, body)
            except TimeoutError:
                raise HTTPException(504, f"no answer within {self.limits.max_seconds:g} s") from None
            finally:
                self._num_requests -= 1
                self._num_bytes -= len(body)

        return limited
