"""Thousands of damaged, hostile and valid requests: no failure of the server, and no leak."""

import copy
import gc
import json
import random
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from in_memory_server import SHAPE, Application, FakeModel, Reply, application, ask

from gradtrail.serving.server.middleware import RequestLimits

METHODS = ("GET", "POST", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "X" * 20)
PATHS = (
    *("/v2/models/digits/infer", "/v2/models/digits/versions/1/infer", "/invocations", "/picture") * 4,
    *("/", "/v2", "/v2/health/ready", "/v2/models/digits", "/v2/models/../infer", "/metrics", "/rollout", "/ping"),
    *("/v2/models/%00/infer", "/v2/models/ü\n/infer", "//", "", "*", "/version", "/.env", "/v2/models//infer"),
)
ODD = (
    *(None, True, False, 0, -1, 255, 256, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, 1e-320, float("nan")),
    *(float("inf"), "", "a", "\x00", "\ud800", "images", [], {}, [[]], [[[]]], {"": None}, "UINT8", "FP32"),
)


def content(rng: random.Random) -> Any:
    """Return a request that is valid, wrong in one place, or nonsense."""
    count = rng.choice((0, 1, 1, 2, 9, 40))
    images = [[[rng.randrange(256) for _ in range(SHAPE[1])] for _ in range(SHAPE[0])] for _ in range(count)]
    tensor: dict[str, Any] = {"name": "images", "shape": [count, *SHAPE], "datatype": "UINT8", "data": images}
    whole: dict[str, Any] = rng.choice(
        (
            {"inputs": [tensor], "id": "x"},
            {"inputs": images},
            {"instances": images},
            {"inputs": [tensor], "outputs": []},
        )
    )
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        place: Any = whole
        while True:
            keys = [*place] if isinstance(place, dict) else [*range(len(place))]
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
                place = place[key]
                continue
            place[key] = copy.deepcopy(rng.choice(ODD))
            break
    return whole


def body(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.choice((0, 1, 100, 5000)))
    if kind < 0.15:
        return rng.choice(
            (b"[" * 5000, b'{"inputs":' * 2000, b"\xff\xfe", b"null", b'"', b"\x89PNG\r\n\x1a\n" + rng.randbytes(50))
        )
    text = json.dumps(content(rng)).encode("utf-8", "surrogatepass")
    if kind < 0.3:  # damaged
        place = rng.randrange(len(text))
        text = text[:place] + rng.randbytes(rng.choice((0, 1, 3))) + text[place + rng.choice((0, 1, 50)) :]
    return text


def headers(rng: random.Random) -> dict[str, str]:
    result = {
        "content-type": rng.choice(("application/json",) * 8 + ("text/csv", "", ";;", "application/json; charset=x"))
    }
    if rng.random() < 0.1:
        result["content-length"] = rng.choice(("0", "-1", "999999999999", "a", "1" * 30))
    if rng.random() < 0.1:
        result["host"] = rng.choice(("", "example.com", "localhost:99999", "\xff", "[::1]", "a" * 5000))
    if rng.random() < 0.1:
        result["origin"] = rng.choice(("null", "http://localhost:8080", "http://example.com", "\xe9"))
    if rng.random() < 0.1:
        result["x-request-id"] = rng.choice(("", "a" * 10_000, "\xff"))
    if rng.random() < 0.05:
        result["authorization"] = rng.choice(("Bearer", "Bearer ÿ", "\xff" * 50))
    return result


def check(reply: Reply, method: str) -> None:
    """Check that an answer is valid, or an error of one line."""
    assert 200 <= reply.status < 500, reply
    assert b"Traceback" not in reply.body
    assert b"site-packages" not in reply.body
    if reply.status >= 400 and method != "HEAD":
        assert [*reply.json] == ["error"]
        assert "\n" not in reply.json["error"]


async def fuzz(app: Application, rng: random.Random, count: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    for _ in range(count):
        method, whole = rng.choice(METHODS), body(rng)
        cuts = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.choice((0, 0, 0, 1, 3))))
        parts: list[bytes | None] = [
            whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)
        ]
        if rng.random() < 0.02:
            parts[-1] = None  # the client disconnects
        reply = await ask(app.app, method, rng.choice(PATHS), parts, headers(rng))
        check(reply, method)
        statuses[reply.status] += 1
    return statuses


@pytest.mark.parametrize(
    "num_requests", [pytest.param(2_000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.nightly)]
)
async def test_thousands_of_requests_cause_no_failure_and_no_leak(
    num_requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    app = application(FakeModel(), limits=RequestLimits(max_body_bytes=20_000, max_images=20))
    rng = random.Random(19)  # noqa: S311
    statuses = await fuzz(app, rng, num_requests - 1000)
    gc.collect()
    tracemalloc.start()
    await fuzz(app, rng, 500)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    statuses += await fuzz(app, rng, 500)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000, f"{grown:,} bytes leaked by 500 requests"
    assert {200, 400, 403, 404, 405, 413, 415, 421} <= {*statuses}, statuses
    assert not caplog.records
    after = await app.post("/invocations", {"inputs": np.zeros(SHAPE, int).tolist()})
    assert after.status == 200
