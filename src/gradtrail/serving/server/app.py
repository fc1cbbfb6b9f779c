"""The application: endpoints of the open inference protocol and of MLflow's scoring server, metrics, and the page."""

import asyncio
from collections.abc import Callable
from importlib.metadata import version as installed
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from gradtrail.serving.server import protocol
from gradtrail.serving.server.middleware import JSON, CheckClient, CountRequests, Limiter, RequestLimits, error_response
from gradtrail.serving.server.router import Answer, Router
from gradtrail.stages.model.exported import Manifest
from gradtrail.support.errors import UserError

VERSION_HEADER = "Gradtrail-Model-Version"
REQUEST_ID = "x-request-id"  # header that assigns a client to a model; without it, the `id` of the protocol
PATHS = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
_PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PICTURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # first bytes of PNG and JPEG


def create_app(router: Router, limits: RequestLimits | None = None, *, token: str = "") -> Starlette:
    """Return the ASGI application to serve; clients send the token, if any, as `Authorization: Bearer …`."""
    page = [
        _page_route("/", "page.html", "text/html"),
        _page_route("/page.css", "page.css", "text/css"),
        _page_route("/page.js", "page.js", "text/javascript"),
    ]
    return Starlette(
        routes=[*_classifying(router, limits or RequestLimits()), *_describing(router), *page],
        middleware=[Middleware(CountRequests, router=router), Middleware(CheckClient, token=token)],
        exception_handlers=dict.fromkeys((HTTPException, ClientDisconnect, Exception), _answer_error),
    )


class _Route(Route):
    """A route that sets itself in the scope, as metrics count requests by route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self}


def _classifying(router: Router, limits: RequestLimits) -> list[Route]:
    """Return the endpoints that classify; they come first, as routes are tried in turn."""
    decoding = asyncio.Lock()

    async def infer(request: Request, body: bytearray) -> Response:
        """Answer a request of https://github.com/kserve/open-inference-protocol, version 2."""
        version = request.path_params.get("version")
        served = router.find(request.path_params["name"], version)
        inference = protocol.read_inference(body, served.about.image_shape, limits.max_images)
        if version is None:
            answer = await router.answer(inference.images, request.headers.get(REQUEST_ID) or inference.id, served)
        else:  # a request for a version gets that version
            answer = await router.answer_with(served, inference.images)
        content = protocol.inference_answer(inference, answer.probabilities, answer.model.about, answer.model.version)
        return _answer(request, answer, content)

    async def invocations(request: Request, body: bytearray) -> Response:
        """Answer a request of MLflow's scoring server."""
        served = router.current
        kind = request.headers.get("content-type", "")
        images = protocol.read_invocation(body, kind, served.about.image_shape, limits.max_images)
        answer = await router.answer(images, request.headers.get(REQUEST_ID), served)
        return _answer(request, answer, protocol.invocation_answer(answer.probabilities))

    async def picture(request: Request, body: bytearray) -> Response:
        """Classify an image file, after converting it into the form of the training images."""
        served = router.current
        if not body.startswith(_PICTURES):
            raise HTTPException(415, "the image must be a PNG or a JPEG")
        async with decoding:  # a large image takes up to 134 MB of memory
            image = await asyncio.to_thread(_decode, body, served.about)
        answer = await router.answer(image[None], request.headers.get(REQUEST_ID), served)
        about, (probabilities,) = answer.model.about, answer.probabilities
        content = {
            "classes": about.classes,
            "probabilities": probabilities,
            "label": int(probabilities.argmax()),
            "image": image,
            "model_name": about.name,
            "model_version": answer.model.version,
        }
        return _answer(request, answer, content)

    endpoints = [*((f"{path}/infer", infer) for path in PATHS), ("/invocations", invocations), ("/picture", picture)]
    limit = Limiter(limits).apply
    return [_Route(path, limit(endpoint), methods=["POST"]) for path, endpoint in endpoints]


def _describing(router: Router) -> list[Route]:
    """Return the endpoints about the server and its model."""

    def ready(_: Request) -> dict[str, Any]:
        if not router.is_ready:
            raise HTTPException(
                503, "the server is shutting down" if router.is_draining else "the model is being loaded"
            )
        return {"ready": True}

    def about(request: Request) -> dict[str, Any]:
        served = router.find(**request.path_params)
        return protocol.metadata(served.about, served.version)

    def model_ready(request: Request) -> dict[str, Any]:
        served = router.find(**request.path_params)
        return {"name": served.about.name, "version": served.version, **ready(request)}

    async def ping(request: Request) -> Response:
        ready(request)
        return Response("\n", media_type=JSON)

    async def version(_: Request) -> Response:
        return Response(installed("mlflow-skinny"), media_type=JSON)  # the part in the image

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(router.metrics.registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return [
        _json_route("/v2", lambda _: {"name": "gradtrail", "version": installed("gradtrail"), "extensions": []}),
        _json_route("/v2/health/live", lambda _: {"live": True}),
        _json_route("/v2/health/ready", ready),
        *(_json_route(path, about) for path in PATHS),
        *(_json_route(f"{path}/ready", model_ready) for path in PATHS),
        _json_route("/rollout", lambda _: router.describe_rollout()),
        *(_Route("/ping", ping), _Route("/version", version), _Route("/metrics", metrics)),
    ]


def _json_route(path: str, content: Callable[[Request], dict[str, Any]]) -> Route:
    async def send(request: Request) -> Response:
        return _json(content(request))

    return _Route(path, send)


def _page_route(path: str, name: str, kind: str) -> Route:
    content = (Path(__file__).parent / "page" / name).read_bytes()

    async def send(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return _Route(path, send)


def _decode(body: bytearray, about: Manifest) -> np.ndarray:
    """Return an image in the form of the model's images, as `gradtrail predict` does."""
    from gradtrail.serving.images import decode_image

    try:
        return decode_image(BytesIO(body), about.image_shape, about.dataset)
    except UserError as error:
        raise HTTPException(400, str(error)) from None


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(protocol.to_json(content), status, headers, JSON)


def _answer(request: Request, answer: Answer, content: dict[str, Any]) -> Response:
    request.scope["gradtrail.is_first"] = answer.is_first
    return _json(content, headers={VERSION_HEADER: answer.model.version})


async def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = "no such endpoint" if error.detail == "Not Found" else error.detail
        return error_response(error.status_code, message, error.headers)
    if isinstance(error, ClientDisconnect):
        return error_response(499, "the client disconnected")
    return error_response(500, "the server failed; its log says why")  # uvicorn logs the exception
