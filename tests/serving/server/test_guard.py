"""Authorization, sizes and time; in every case the answer is one line of JSON."""

import asyncio
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from asgi import JSON, SHAPE, FakeModel, Reply, application, ask, inference, shares

from gradtrail.serving.server.guard import Limits, require_token
from gradtrail.support.errors import UserError

TOKEN = "a-secret-of-32-characters-or-so"  # noqa: S105
INFER = "/v2/models/digits/infer"
ONE = inference(np.zeros((1, *SHAPE), np.uint8))
BODY = json.dumps(ONE).encode()


def error(reply: Reply) -> str:
    """Return the message of an error."""
    assert reply.headers["content-type"] == "application/json"
    assert [*reply.json] == ["error"]
    message = str(reply.json["error"])
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def waiting_model(opened: threading.Event) -> FakeModel:
    """Return a model that answers once the event is set."""

    def wait(batch: np.ndarray) -> np.ndarray:
        assert opened.wait(60)
        return shares(batch)

    return FakeModel(wait)


def test_other_addresses_than_loopback_need_a_token() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        require_token(host, "")
    for host in ("0.0.0.0", "192.0.2.1", "example.com"):  # noqa: S104
        with pytest.raises(UserError, match="GRADTRAIL_TOKEN"):
            require_token(host, "")
        require_token(host, TOKEN)
    for weak in ("short", "with a space in it, but long", "\x00" * 20, "ü" * 20):
        with pytest.raises(UserError, match="at least 16 printable ASCII"):
            require_token("127.0.0.1", weak)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        (TOKEN, 401),
        (f"Basic {TOKEN}", 401),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        ("Bearer ÿ", 401),
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
    ],
)
async def test_token_is_needed_except_for_health_and_the_page(authorization: str | None, status: int) -> None:
    app = application(FakeModel(), token=TOKEN)
    headers = {"authorization": authorization} if authorization is not None else {}
    headers |= {"host": "digits.example.com", "origin": "https://elsewhere.example.com"}
    for path in ("/v2/models/digits", "/metrics", "/docs", "/openapi.json"):
        assert (await app.get(path, headers)).status == status
    reply = await app.post(INFER, ONE, headers)
    assert reply.status == status
    if status == 401:
        assert reply.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in error(reply)
    for path in ("/", "/page.js", "/page.css", "/v2/health/live", "/v2/health/ready", "/ping"):
        assert (await app.get(path, headers)).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:9"}, 200),
        ({"host": "localhost:8080", "origin": "http://localhost:8080"}, 200),
        ({"host": "rebound.example.com"}, 421),
        ({"host": "localhost.example.com"}, 421),
        ({"host": ""}, 421),
        ({"host": "localhost:8080", "origin": "http://localhost:9999"}, 403),
        ({"host": "localhost:8080", "origin": "null"}, 403),
    ],
)
async def test_other_pages_are_refused_without_a_token(headers: Mapping[str, str], status: int) -> None:
    app = application(FakeModel())
    for reply in (await app.post(INFER, ONE, headers), await app.get("/", headers)):
        assert reply.status == status
        if status != 200:
            error(reply)


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization", "Content-Length"])
async def test_checked_header_is_refused_twice(name: str) -> None:
    values = {"Host": "localhost", "Origin": "http://localhost", "Authorization": f"Bearer {TOKEN}"}
    headers = dict.fromkeys((name, name.lower()), values.get(name, str(len(BODY)))) | {"host": "localhost"}

    for token in ("", TOKEN):
        app = application(FakeModel(), token=token)
        for reply in (await app.post(INFER, ONE, headers), await app.get("/ping", headers)):
            assert (reply.status, error(reply)) == (400, f"{name}: must be sent once, got 2 such headers")


async def test_large_body_is_refused_with_a_length_and_without() -> None:
    app = application(FakeModel(), limits=Limits(max_body_bytes=1024))
    for header in ({"content-length": "1200"}, {"transfer-encoding": "chunked"}):
        reply = await ask(app.guard, "POST", INFER, [b" " * 300] * 4, JSON | header)
        assert (reply.status, error(reply)) == (413, "the body has more than 1,024 bytes")
    assert (await app.post(INFER, BODY + b" " * (1024 - len(BODY)))).status == 200
    for length in ("-1", "1e3", "", "9" * 30):
        reply = await ask(app.guard, "POST", INFER, [BODY], JSON | {"content-length": length})
        assert (reply.status, error(reply)) == (400, "Content-Length: must be a number")


async def test_too_many_requests_are_refused() -> None:
    opened = threading.Event()

    app = application(waiting_model(opened), limits=Limits(max_requests=3))
    tasks = [asyncio.create_task(app.post(INFER, ONE)) for _ in range(3)]
    await asyncio.sleep(0)
    reply = await app.post(INFER, ONE)
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    error(reply)
    assert (await app.get("/v2/health/ready")).status == 200
    opened.set()
    assert [reply.status for reply in await asyncio.gather(*tasks)] == [200] * 3
    assert (await app.post(INFER, ONE)).status == 200


def test_memory_for_bodies_is_bounded() -> None:
    async def main() -> None:
        app = application(FakeModel(), limits=Limits(max_body_bytes=1024))
        slow = [asyncio.create_task(_send_half(app.guard)) for _ in range(8)]
        await asyncio.sleep(0)
        reply = await ask(app.guard, "POST", INFER, [b" " * 1024], JSON)
        assert reply.status == 429
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert (await app.post(INFER, ONE)).status == 200

    async def _send_half(app: Any) -> None:
        async def receive() -> dict[str, Any]:
            if sent:
                await asyncio.sleep(3600)
            sent.append(True)
            return {"type": "http.request", "body": b" " * 1024, "more_body": True}

        sent: list[bool] = []
        scope = {"type": "http", "method": "POST", "path": INFER, "headers": [(b"host", b"localhost")]}
        await app(scope, receive, lambda _: asyncio.sleep(0))

    asyncio.run(main())


async def test_slow_request_is_ended() -> None:
    opened = threading.Event()

    app = application(waiting_model(opened), limits=Limits(max_seconds=0.01))
    reply = await ask(app.guard, "POST", INFER, [BODY[:5], BODY[5:]], JSON)
    assert (reply.status, error(reply)) == (504, "no answer within 0.01 s")
    opened.set()


async def test_client_disconnect_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    app = application(FakeModel())
    assert (await ask(app.guard, "POST", INFER, [b"{", None], JSON)).status == 0
    assert not caplog.records
    assert (await app.post(INFER, ONE)).status == 200


async def test_bug_is_one_line_for_the_client_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: np.ndarray) -> np.ndarray:
        raise RuntimeError("secret in /home/somebody")

    app = application(FakeModel(fail))
    with caplog.at_level(logging.ERROR):
        reply = await app.post(INFER, ONE)
    assert (reply.status, error(reply)) == (500, "the server failed; its log says why")
    assert "secret in /home/somebody" in caplog.text
    assert "Traceback" in caplog.text
    assert 'gradtrail_errors_total{kind="failed"} 1.0' in app.metrics.text().decode()


async def test_access_log_has_one_printable_line_per_request_and_is_off_by_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = application(FakeModel())
    with caplog.at_level(logging.INFO):
        await app.get("/v2")
        assert not caplog.records
        app.guard.has_access_log = True
        await app.get("/v2\n\x1b[2J")
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("GET /v2\\n\\x1b[2J 404 ")
    assert message.isprintable()
