"""The answer of each endpoint, compared with the specification and MLflow's; authorization, sizes and time."""

import asyncio
import io
import json
import logging
import re
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi import (
    CLASSES,
    JSON,
    SHAPE,
    FakeModel,
    Reply,
    application,
    ask,
    inference,
    probabilities,
    shares,
    small_export,
)
from mlflow.version import VERSION
from PIL import Image

from gradtrail.serving.server.guard import Limits, require_token
from gradtrail.serving.server.router import Source
from gradtrail.support.errors import UserError
from gradtrail.tracking.pyfunc import _load_pyfunc

FIRST = {"role": "primary", "version": "1"}


def images(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *SHAPE), dtype=np.uint8)


async def test_open_inference_protocol_is_answered_as_specified() -> None:
    app = application(FakeModel())
    assert (await app.get("/v2")).json == {"name": "gradtrail", "version": "0.1.0", "extensions": []}
    assert (await app.get("/v2/health/live")).json == {"live": True}
    assert (await app.get("/v2/health/ready")).json == {"ready": True}
    for path in ("/v2/models/digits", "/v2/models/digits/versions/1"):
        about = (await app.get(path)).json
        assert about["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, *SHAPE]}]
        assert {output["name"]: output["datatype"] for output in about["outputs"]} == {
            "probabilities": "FP32",
            "label": "INT64",
        }
        assert (await app.get(f"{path}/ready")).json == {"name": "digits", "version": "1", "ready": True}
        reply = await app.post(f"{path}/infer", inference(images(3), id="mine"))
        assert [reply.json[key] for key in ("model_name", "model_version", "id")] == ["digits", "1", "mine"]
        np.testing.assert_array_equal(probabilities(reply), shares(images(3)))
        (label,) = (output for output in reply.json["outputs"] if output["name"] == "label")
        assert (label["datatype"], label["shape"]) == ("INT64", [3])
        assert label["data"] == shares(images(3)).argmax(axis=1).tolist()
    only = await app.post("/v2/models/digits/infer", inference(images(1), outputs=[{"name": "label"}]))
    assert [output["name"] for output in only.json["outputs"]] == ["label"]
    none = await app.post("/v2/models/digits/infer", inference(images(0)))
    assert probabilities(none).shape == (0, len(CLASSES))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/digits/versions/2", 404),
        ("POST", "/v2/models/other/infer", 404),
        ("GET", "/nothing", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/" + "x" * 3000, 414),
        ("GET", "/v2/models/digits/infer", 405),
    ],
)
async def test_unknown_address_is_one_line(method: str, path: str, status: int) -> None:
    app = application(FakeModel())
    reply = await (app.get(path) if method == "GET" else app.post(path, inference(images(1))))
    assert reply.status == status
    assert [*reply.json] == ["error"]


async def test_server_is_live_but_not_ready_without_a_model_and_while_it_drains() -> None:
    app = application()
    for path in ("/v2/health/ready", "/ping", "/v2/models/digits"):
        reply = await app.get(path)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert (await app.post("/invocations", {"inputs": images(1).tolist()})).status == 503
    assert (await app.get("/v2/health/live")).status == 200
    assert (await app.get("/docs")).status == 200
    app.router.swap(app.router.serve(FakeModel().loaded()))
    assert (await app.get("/v2/health/ready")).status == 200
    app.router.is_draining = True
    assert (await app.get("/v2/health/ready")).status == 503
    assert (await app.post("/v2/models/digits/infer", inference(images(1)))).status == 200


async def test_invocations_are_answered_like_mlflows_server(tmp_path: Path) -> None:
    """The oracle is what MLflow's server makes of the pyfunc model of the same export."""
    with warnings.catch_warnings(action="ignore"):  # of the import
        from mlflow.pyfunc.scoring_server import predictions_to_json
    folder = small_export(tmp_path / "export")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    model = _load_pyfunc(str(folder))

    app = application()
    app.router.swap(await app.router.load(Source(folder=folder)))
    for data in (pixels, pixels[0], pixels / 255, (pixels[0] / 255)):
        expected = io.StringIO()
        predictions_to_json(model.predict(np.asarray(data.tolist())), expected)
        oracle = json.loads(expected.getvalue())
        for key in ("inputs", "instances"):
            reply = await app.post("/invocations", {key: data.tolist()})
            assert reply.status == 200, reply.body
            assert reply.json.keys() == oracle.keys() == {"predictions"}
            predictions, expected_predictions = reply.json["predictions"], oracle["predictions"]
            assert predictions.keys() == expected_predictions.keys()
            assert predictions["label"] == expected_predictions["label"]
            np.testing.assert_allclose(predictions["probabilities"], expected_predictions["probabilities"], rtol=1e-5)
    assert (await app.get("/ping")).body == b"\n"
    assert (await app.get("/version")).body.decode() == VERSION


def picture(size: tuple[int, int], kind: str = "PNG") -> bytes:
    drawn = Image.new("L", size, 0)
    drawn.paste(255, (size[0] // 2 - 2, size[1] // 4, size[0] // 2 + 2, 3 * size[1] // 4))
    content = io.BytesIO()
    drawn.save(content, kind)
    return content.getvalue()


@pytest.mark.parametrize("path", ["/v2/models/digits/infer", "/invocations", "/picture"])
async def test_answer_without_probabilities_is_a_failure(path: str) -> None:
    content = {"/invocations": {"inputs": images(1).tolist()}, "/picture": picture((60, 80))}

    app = application(FakeModel(lambda batch: shares(batch) * 3 - 1))
    reply = await app.post(path, content.get(path, inference(images(1))))
    assert (reply.status, reply.json) == (500, {"error": "the server failed; its log says why"})
    assert app.metrics.registry.get_sample_value("gradtrail_model_errors_total", FIRST) == 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
async def test_picture_is_converted_as_by_predict(kind: str, tmp_path: Path) -> None:
    from gradtrail.serving.images import decode_image, framing_of

    path = tmp_path / "picture"
    path.write_bytes(picture((60, 80), kind))
    image = decode_image(path, SHAPE, framing_of("digits 00000000"))

    app = application(FakeModel())
    reply = await app.post("/picture", path.read_bytes(), {"content-type": "image/png"})
    assert reply.status == 200, reply.body
    assert reply.json["image"] == image.tolist()
    (expected,) = shares(image[None])
    np.testing.assert_allclose(reply.json["probabilities"], expected)
    assert reply.json["label"] == expected.argmax()
    assert reply.json["classes"] == [*CLASSES]
    assert (reply.json["model_name"], reply.json["model_version"]) == ("digits", "1")


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 415, "must be a PNG or a JPEG"),
        (picture((9, 9), "BMP"), 415, "must be a PNG or a JPEG"),
        (picture((60, 80))[:60], 400, "not a readable image"),
        (b"\xff\xd8\xff" + b"x" * 100, 400, "not a readable image"),
        (picture((20_000, 1000)), 400, "scale it down"),
    ],
    ids=["empty", "BMP", "cut off", "no JPEG", "too large"],
)
async def test_invalid_picture_is_refused_in_one_line_without_a_path(content: bytes, status: int, message: str) -> None:
    app = application(FakeModel())
    reply = await app.post("/picture", content)
    assert reply.status == status
    assert message in reply.json["error"]
    assert not re.search(r"BytesIO|/", reply.json["error"])


async def test_pages_load_nothing_from_other_hosts() -> None:
    app = application(FakeModel())
    for path in ("/", "/page.css", "/page.js", "/docs"):
        reply = await app.get(path)
        assert reply.status == 200
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        text = reply.body.decode()
        assert not re.search(r"(src|href)=.?(https?:)?//|@import|url\(", text)
        assert not re.search(r"<script>|style=|onclick=", text)


async def test_docs_list_every_endpoint() -> None:
    app = application(FakeModel())
    described: dict[str, Any] = (await app.get("/openapi.json")).json
    page = (await app.get("/docs")).body.decode()
    assert "/v2/models/{name}/infer" in described["paths"]
    for path in described["paths"]:
        assert f"<code>{path}</code>" in page
    assert "<code>instances</code>" in page
    assert "`" not in page


async def test_metrics_count_requests_by_route_and_the_first_answer_as_cold() -> None:
    app = application(FakeModel())
    for _ in range(3):
        await app.post("/v2/models/digits/infer", inference(images(2)))
    await app.get("/v2/models/other")
    await app.get("/nothing")
    text = (await app.get("/metrics")).body.decode()
    route = 'route="/v2/models/{name}/infer",status="200"'
    assert f'gradtrail_request_seconds_count{{{route},temperature="cold"}} 1.0' in text
    assert f'gradtrail_request_seconds_count{{{route},temperature="warm"}} 2.0' in text
    assert 'gradtrail_errors_total{kind="not_found"} 2.0' in text
    assert (await app.get("/" + "a" * 5000)).status == 414
    await ask(app.guard, "POST", "/invocations", [b"{", None], JSON)  # the client disconnects
    text = (await app.get("/metrics")).body.decode()
    assert 'gradtrail_errors_total{kind="too_large"} 1.0' in text
    assert 'gradtrail_errors_total{kind="invalid"} 1.0' in text
    assert 'gradtrail_errors_total{kind="failed"} 0.0' in text
    assert 'gradtrail_model_info{digest="' in text
    assert 'gradtrail_batch_fill_ratio_count{size="4"} 3.0' in text


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
