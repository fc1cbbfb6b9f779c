"""The answer of each endpoint, compared with the specification and MLflow's; authorization, sizes and time."""

import asyncio
import io
import json
import re
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import write_small_export
from factories import image_file
from in_memory_server import (
    CLASSES,
    JSON,
    SHAPE,
    SIZES,
    FakeModel,
    Gate,
    application,
    ask,
    inference,
    probabilities,
    shares,
)
from mlflow.version import VERSION
from PIL import Image

from gradtrail.serving import metrics
from gradtrail.serving.server.middleware import RequestLimits, require_token
from gradtrail.support.errors import UserError
from gradtrail.tracking.pyfunc import _load_pyfunc

TOKEN = "a-secret-of-32-characters-or-so"  # noqa: S105
INFER, INVOKE = "/v2/models/digits/infer", "/invocations"
ONE = inference(np.zeros((1, *SHAPE), np.uint8))
BODY = json.dumps(ONE).encode()
MANY = json.dumps(inference(np.zeros((3, *SHAPE), np.uint8))).encode()


def images(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *SHAPE), dtype=np.uint8)


def picture(size: tuple[int, int], kind: str = "PNG") -> bytes:
    drawn = Image.new("L", size, 0)
    drawn.paste(255, (size[0] // 2 - 2, size[1] // 4, size[0] // 2 + 2, 3 * size[1] // 4))
    return image_file(np.asarray(drawn), kind)


def with_token(value: str) -> dict[str, str]:
    """Return the headers of a client elsewhere."""
    return {"authorization": value, "host": "digits.example.com", "origin": "https://elsewhere.example.com"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "error"),
    [
        # addresses
        ("GET", "/v2/models/digits/versions/2", {}, b"", 404, "no version '2' of 'digits' here; it is '1'"),
        ("POST", "/v2/models/other/infer", {}, BODY, 404, "no model 'other' here; it is 'digits'"),
        ("GET", "/nothing", {}, b"", 404, "no such endpoint"),
        ("GET", "/../../etc/passwd", {}, b"", 404, "no such endpoint"),
        ("GET", INFER, {}, b"", 405, "Method Not Allowed"),
        ("POST", "/v2", {}, b"", 405, "Method Not Allowed"),
        # bodies
        ("POST", INFER, {}, b"{", 400, "not readable as JSON: "),
        ("POST", INFER, {}, MANY, 413, "3 images; a request may have 2"),
        ("POST", INFER, {}, b" " * 2049, 413, "the body has more than 2,048 bytes"),
        (
            "POST",
            INVOKE,
            {"content-type": "text/csv"},
            b"",
            415,
            "Content-Type: must be application/json, got 'text/csv'",
        ),
        ("POST", "/picture", {}, b"", 415, "the image must be a PNG or a JPEG"),
        ("POST", "/picture", {}, picture((9, 9), "BMP"), 415, "the image must be a PNG or a JPEG"),
        ("POST", "/picture", {}, picture((60, 80))[:60], 400, "not a readable image"),
        ("POST", "/picture", {}, b"\xff\xd8\xff" + b"x" * 100, 400, "not a readable image"),
        ("POST", "/picture", {}, picture((20_000, 1000))[:1000], 400, "scale it down"),
        # other pages, in a browser on this machine
        *(
            ("POST", INFER, headers, BODY, status, error)
            for headers, status, error in (
                ({"host": "127.0.0.1"}, 200, ""),
                ({"host": "[::1]:9"}, 200, ""),
                ({"host": "localhost:8080", "origin": "http://localhost:8080"}, 200, ""),
                ({"host": "rebound.example.com"}, 421, "Host: must be this machine, such as localhost"),
                ({"host": "localhost.example.com"}, 421, "Host: must be this machine, such as localhost"),
                ({"host": ""}, 421, "Host: must be this machine, such as localhost"),
                ({"host": ("rebound.example.com", "localhost")}, 400, "Host: sent 2 times; send it once"),
                ({"origin": ("http://example.com", "http://localhost:8080")}, 400, "Origin: sent 2 times"),
                ({"host": "localhost:8080", "origin": "http://localhost:9999"}, 403, "Origin: cross-origin requests"),
                ({"host": "localhost:8080", "origin": "null"}, 403, "Origin: cross-origin requests"),
            )
        ),
        ("GET", "/", {"host": "rebound.example.com"}, b"", 421, "Host: must be this machine, such as localhost"),
    ],
)
async def test_requests_without_a_token(
    method: str, path: str, headers: Mapping[str, Any], body: bytes, status: int, error: str
) -> None:
    app = application(FakeModel(), limits=RequestLimits(max_body_bytes=2048, max_images=2))
    reply = await ask(app.app, method, path, [body[:500], body[500:]], JSON | dict(headers))
    assert reply.status == status, reply.body
    if error:
        assert reply.headers["content-type"] == "application/json"
        assert [*reply.json] == ["error"]
        assert error in reply.json["error"]
        assert not re.search(r"\n|Traceback|BytesIO|/work|/home", reply.json["error"])


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("", 401),
        (TOKEN, 401),
        (f"Basic {TOKEN}", 401),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        ("Bearer ÿ", 401),
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
    ],
)
async def test_token_is_needed_except_for_health_and_the_page(authorization: str, status: int) -> None:
    app = application(FakeModel(), token=TOKEN)
    headers = with_token(authorization)
    for path in ("/v2/models/digits", "/metrics", "/rollout"):
        assert (await app.get(path, headers)).status == status
    reply = await app.post(INFER, ONE, headers)
    assert reply.status == status
    if status == 401:
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json == {"error": "a token is needed: Authorization: Bearer …"}
    for path in ("/", "/page.js", "/page.css", "/v2/health/live", "/v2/health/ready", "/ping"):
        assert (await app.get(path, headers)).status == 200


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


async def test_open_inference_protocol_is_answered_as_specified() -> None:
    app = application(FakeModel())
    assert (await app.get("/v2")).json == {"name": "gradtrail", "version": version("gradtrail"), "extensions": []}
    assert (await app.get("/v2/health/live")).json == {"live": True}
    assert (await app.get("/v2/health/ready")).json == {"ready": True}
    for path in ("/v2/models/digits", "/v2/models/digits/versions/1"):
        about = (await app.get(path)).json
        assert about["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, *SHAPE]}]
        types = {output["name"]: output["datatype"] for output in about["outputs"]}
        assert types == {"probabilities": "FP32", "label": "INT64"}
        assert (await app.get(f"{path}/ready")).json == {"name": "digits", "version": "1", "ready": True}
        reply = await app.post(f"{path}/infer", inference(images(3), id="mine"))
        assert [reply.json[key] for key in ("model_name", "model_version", "id")] == ["digits", "1", "mine"]
        assert reply.headers["gradtrail-model-version"] == "1"
        np.testing.assert_array_equal(probabilities(reply), shares(images(3)))
        (label,) = (output for output in reply.json["outputs"] if output["name"] == "label")
        assert (label["datatype"], label["shape"]) == ("INT64", [3])
        assert label["data"] == shares(images(3)).argmax(axis=1).tolist()
    only = await app.post(INFER, inference(images(1), outputs=[{"name": "label"}]))
    assert [output["name"] for output in only.json["outputs"]] == ["label"]
    none = await app.post(INFER, inference(images(0)))
    assert probabilities(none).shape == (0, len(CLASSES))


async def test_server_is_live_but_not_ready_without_a_model_and_while_it_drains() -> None:
    app = application()
    for path in ("/v2/health/ready", "/ping", "/v2/models/digits"):
        reply = await app.get(path)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert (await app.post(INVOKE, {"inputs": images(1).tolist()})).status == 503
    assert (await app.get("/v2/health/live")).status == 200
    app.router.swap(FakeModel().served_by(app.router))
    assert (await app.get("/v2/health/ready")).status == 200
    app.router.is_draining = True
    assert (await app.get("/v2/health/ready")).status == 503
    assert (await app.post(INFER, ONE)).status == 200


async def test_invocations_are_answered_like_mlflows_server(folder: Path) -> None:
    """The oracle is what MLflow's server makes of the pyfunc model of the same export."""
    with warnings.catch_warnings(action="ignore"):  # of the import
        from mlflow.pyfunc.scoring_server import predictions_to_json
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    model = _load_pyfunc(str(folder))

    app = application()
    app.router.swap(await app.router.load(folder))
    for data in (pixels, pixels[0], pixels / 255, (pixels[0] / 255)):
        expected = io.StringIO()
        predictions_to_json(model.predict(np.asarray(data.tolist())), expected)
        oracle = json.loads(expected.getvalue())
        for key in ("inputs", "instances"):
            reply = await app.post(INVOKE, {key: data.tolist()})
            assert reply.status == 200, reply.body
            assert reply.json.keys() == oracle.keys() == {"predictions"}
            predictions, expected_predictions = reply.json["predictions"], oracle["predictions"]
            assert predictions.keys() == expected_predictions.keys()
            assert predictions["label"] == expected_predictions["label"]
            np.testing.assert_allclose(predictions["probabilities"], expected_predictions["probabilities"], rtol=1e-5)
    assert (await app.get("/ping")).body == b"\n"
    assert (await app.get("/version")).body.decode() == VERSION


async def test_color_images_are_answered_with_the_names_of_classes(tmp_path: Path) -> None:
    shape, classes = (12, 10, 3), tuple("abcdefghij")
    about = {"image_shape": shape, "classes": classes, "dataset": "folder 1234abcd"}
    app, folder = application(), write_small_export(tmp_path / "export", model="cnn", batch_sizes=SIZES, **about)
    app.router.swap(await app.router.load(folder))
    sent = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
    expected = app.router.current.model.predict(sent)
    about = (await app.get("/v2/models/digits")).json
    assert (about["inputs"][0]["shape"], about["parameters"]["classes"]) == ([-1, *shape], [*classes])
    reply = await app.post(INFER, inference(sent))
    np.testing.assert_allclose(probabilities(reply), expected, rtol=1e-5)
    for data in (sent, sent[0], sent / 255):
        labels = (await app.post(INVOKE, {"inputs": data.tolist()})).json["predictions"]["label"]
        assert labels == expected.argmax(axis=1)[: len(labels)].tolist()
    reply = await app.post("/picture", image_file(sent[0]))
    assert reply.json["image"] == sent[0].tolist()
    assert reply.json["classes"][reply.json["label"]] == classes[expected[0].argmax()]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
async def test_picture_is_converted_as_by_predict(kind: str, tmp_path: Path) -> None:
    from gradtrail.serving.images import decode_image

    path = tmp_path / "picture"
    path.write_bytes(picture((60, 80), kind))
    image = decode_image(path, SHAPE, "digits 00000000")

    app = application(FakeModel())
    reply = await app.post("/picture", path.read_bytes(), {"content-type": "image/png"})
    assert reply.status == 200, reply.body
    assert reply.json["image"] == image.tolist()
    (expected,) = shares(image[None])
    np.testing.assert_allclose(reply.json["probabilities"], expected)
    assert reply.json["label"] == expected.argmax()
    assert reply.json["classes"] == [*CLASSES]
    assert (reply.json["model_name"], reply.json["model_version"]) == ("digits", "1")


async def test_page_loads_nothing_from_other_hosts() -> None:
    app = application(FakeModel())
    for path in ("/", "/page.css", "/page.js"):
        reply = await app.get(path)
        assert reply.status == 200
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        text = reply.body.decode()
        assert not re.search(r"(src|href)=.?(https?:)?//|@import|url\(", text)
        assert not re.search(r"<script>|style=|onclick=", text)


async def test_metrics_count_requests_by_route_and_the_first_answer_as_cold(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SLOW_SECONDS", {"warm": 600.0, "cold": 0.0})  # else a busy machine decides
    app = application(FakeModel())
    for _ in range(3):
        await app.post(INFER, inference(images(2)))
    await app.get("/v2/models/other")
    for number in range(9):
        await app.get(f"/nothing/{number}")
    await ask(app.app, "POST", INVOKE, [b"{", None], JSON)  # the client disconnects
    assert not caplog.records
    text = (await app.get("/metrics")).body.decode()
    route = 'route="/v2/models/{name}/infer",status="200"'
    assert f'gradtrail_request_seconds_count{{{route},temperature="cold"}} 1.0' in text
    assert f'gradtrail_request_seconds_count{{{route},temperature="warm"}} 2.0' in text
    assert 'gradtrail_request_seconds_count{route="other",status="404",temperature="warm"} 9.0' in text
    assert "/nothing" not in text
    found = re.findall(r'gradtrail_requests_total\{outcome="(\w+)",temperature="(\w+)"\} ([1-9]\d*)', text)
    assert sorted(found) == [("answered", "warm", "2"), ("refused", "warm", "1"), ("slow", "cold", "1")]
    assert 'gradtrail_model_info{digest="' in text
    assert 'gradtrail_batch_fill_ratio_count{size="4"} 3.0' in text


async def test_too_many_requests_are_refused() -> None:
    gate = Gate()
    app = application(FakeModel(gate), limits=RequestLimits(max_requests=3))
    tasks = [asyncio.create_task(app.post(INFER, ONE)) for _ in range(3)]
    await asyncio.sleep(0)
    reply = await app.post(INFER, ONE)
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert reply.json == {"error": "3 requests are in progress already; try again"}
    assert (await app.get("/v2/health/ready")).status == 200
    gate.opened.set()
    assert [reply.status for reply in await asyncio.gather(*tasks)] == [200] * 3
    assert (await app.post(INFER, ONE)).status == 200


async def test_bodies_in_progress_share_one_budget_which_is_free_again_once_they_end() -> None:
    app = application(FakeModel(), limits=RequestLimits(max_body_bytes=40_000, max_total_bytes=100_000))
    whole = BODY.ljust(40_000)

    async def send(*parts: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(ask(app.app, "POST", INFER, parts, JSON))
        for _ in range(100):
            await asyncio.sleep(0)
        return task

    unfinished = [await send(*[b" " * 1000] * 30, ..., b"") for _ in range(20)]
    answers = [task.result() for task in unfinished if task.done()]
    message = {"error": "bodies of 100,000 bytes are in progress already; try again"}
    assert all((one.status, one.headers["retry-after"], one.json) == (429, "1", message) for one in answers)
    waiting = [task for task in unfinished if not task.done()]
    assert len(waiting) == 3, "90,000 bytes; a fourth one would exceed the limit"
    assert (await app.post(INFER, whole)).status == 429
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    ends = (((b" " * 30_000, None), 499), ((b"x" * 40_000,), 400), ((b" " * 40_001,), 413), ((whole,), 200))
    for parts, status in ends * 4:  # none keeps a part of the budget
        assert (await (await send(*parts))).status == status


async def test_slow_request_is_ended() -> None:
    gate = Gate()
    app = application(FakeModel(gate), limits=RequestLimits(max_seconds=0.01))
    reply = await ask(app.app, "POST", INFER, [BODY[:5], BODY[5:]], JSON)
    assert (reply.status, reply.json) == (504, {"error": "no answer within 0.01 s"})
    gate.opened.set()


def failing(_: np.ndarray) -> np.ndarray:
    raise RuntimeError("secret in /home/somebody")


@pytest.mark.parametrize(("function", "num_refused"), [(failing, 0), (lambda batch: shares(batch) * 3 - 1, 1)])
@pytest.mark.parametrize(
    ("path", "content"), [(INFER, ONE), (INVOKE, {"inputs": images(1).tolist()}), ("/picture", picture((60, 80)))]
)
async def test_failure_of_the_model_is_one_line_and_is_counted(
    function: Any, num_refused: int, path: str, content: Any
) -> None:
    app = application(FakeModel(function))
    reply = await app.post(path, content)
    assert (reply.status, reply.json) == (500, {"error": "the server failed; its log says why"})
    counted = {"route": path.replace("digits", "{name}"), "status": "500", "temperature": "warm"}
    for metric, labels in (
        ("gradtrail_model_errors_total", {"role": "primary", "version": "1"}),
        ("gradtrail_requests_total", {"outcome": "failed", "temperature": "warm"}),
        ("gradtrail_request_seconds_count", counted),
    ):
        assert app.metrics.registry.get_sample_value(metric, labels) == 1
    refused = app.metrics.registry.get_sample_value(
        "gradtrail_refused_answers_total", {"role": "primary", "version": "1"}
    )
    assert refused == num_refused
