"""The application: endpoints of the open inference protocol and of MLflow's scoring server, metrics, pages."""

import re
from collections.abc import Awaitable, Callable
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.server import protocol
from gradtrail.serving.server.guard import Guard, Limits
from gradtrail.serving.server.refusal import JSON, Refusal, not_ready
from gradtrail.serving.server.router import Answer, Router
from gradtrail.serving.server.uploads import Uploads

VERSION_HEADER = "Gradtrail-Model-Version"
REQUEST_ID = "x-request-id"  # header that assigns a client to a model; without it, the `id` of the protocol
ROUTES = (
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/{name}", "/v2/models/{name}/ready"),
    *("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}"),
    *("/v2/models/{name}/versions/{version}/ready", "/v2/models/{name}/versions/{version}/infer"),
    *("/invocations", "/ping", "/version", "/metrics", "/rollout", "/picture", "/docs", "/openapi.json"),
    *("/", "/page.css", "/page.js"),
)
_FOLDER = Path(__file__).parent / "page"
_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_ERRORS = {400: "invalid", 401: "unauthorized", 403: "unauthorized", 404: "not_found", 405: "invalid"}
_ERRORS |= {413: "too_large", 415: "invalid", 421: "unauthorized", 429: "overloaded", 503: "not_ready", 504: "timeout"}
_ERRORS |= {414: "too_large", 499: "invalid"}
_Endpoint = Callable[..., Awaitable[Response]]


def create_app(router: Router, guard: Guard) -> FastAPI:
    """Return the application, and set it in the guard, which is the ASGI application to serve.

    Args:
        router: Router with the model and the metrics.
        guard: Guard in front of the application; it counts each request in the metrics.
    """
    app = FastAPI(
        title="gradtrail serve",
        description="Answers with an exported model: the open inference protocol, and MLflow's scoring server.",
        version=installed("gradtrail"),
        docs_url=None,  # FastAPI's page loads outside scripts
        redoc_url=None,
    )
    app.add_exception_handler(Refusal, _answer_refusal)  # type: ignore[arg-type] # starlette's type says Exception
    app.add_exception_handler(HTTPException, _answer_http_error)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _answer_failure)
    _add_inference(app, router, guard.limits)
    _add_mlflow(app, router, guard.limits)
    _add_pages(app, router)
    guard.app = app
    guard.observe = _counter(router.metrics)
    return app


def _add_inference(app: FastAPI, router: Router, limits: Limits) -> None:
    """Add the open inference protocol, version 2: https://github.com/kserve/open-inference-protocol."""

    async def server() -> Response:
        """Name, version and extensions of the server."""
        return _json({"name": "gradtrail", "version": app.version, "extensions": []})

    async def live() -> Response:
        """Whether the process runs."""
        return _json({"live": True})

    async def ready() -> Response:
        """Whether requests are answered: all batch sizes are compiled, and the server is not shutting down."""
        return _ready(router)

    async def about(name: str, version: str | None = None) -> Response:
        """Inputs, outputs and classes of the model."""
        served = router.find(name, version)
        return _json(protocol.metadata(served.about, served.version))

    async def model_ready(name: str, version: str | None = None) -> Response:
        """Whether this model answers requests."""
        served = router.find(name, version)
        return _json(
            {"name": name, "ready": router.is_ready, "version": served.version}, 200 if router.is_ready else 503
        )

    async def infer(request: Request) -> Response:
        """Classify images: one tensor `images`, UINT8 or FP32 from 0 to 1, of shape [images, height, width]."""
        version = request.path_params.get("version")
        served = router.find(request.path_params["name"], version)
        inference = protocol.read_inference(await request.body(), served.about.image_shape, limits.max_images)
        request_id = request.headers.get(REQUEST_ID) or inference.id
        if version is None:
            answer = await router.answer(inference.images, request_id, served)
        else:  # a request for a version gets that version
            answer = await router.answer_with(served, inference.images)
        body = protocol.inference_answer(inference, answer.probabilities, answer.model.about, answer.model.version)
        return _answer(request, body, answer)

    app.add_api_route("/v2", server)
    app.add_api_route("/v2/health/live", live)
    app.add_api_route("/v2/health/ready", ready)
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        app.add_api_route(path, about)
        app.add_api_route(f"{path}/ready", model_ready)
        _add_fast(app, f"{path}/infer", infer, _INFERENCE)


class _CountedRoute(Route):
    """A route of Starlette that sets itself in the scope, as FastAPI's do: metrics count requests by route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.NONE:
            child["route"] = self
        return match, child


def _add_fast(app: FastAPI, path: str, endpoint: _Endpoint, example: dict[str, Any]) -> None:
    """Add an endpoint that Starlette alone handles, as FastAPI would double its time; FastAPI only describes it."""
    app.router.routes.insert(0, _CountedRoute(path, endpoint, methods=["POST"]))
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    body = {"required": True, "content": {JSON: {"schema": {"type": "object"}, "example": example}}}
    described = {"parameters": parameters, "requestBody": body}
    app.add_api_route(path, endpoint, methods=["POST"], openapi_extra=described)


def _add_mlflow(app: FastAPI, router: Router, limits: Limits) -> None:
    """Add the endpoints of MLflow's scoring server."""
    mlflow_version = installed("mlflow-skinny")  # the part of MLflow that the server's image has

    async def invocations(request: Request) -> Response:
        """Classify images: `inputs` or `instances`, integers from 0 to 255, or floats from 0 to 1."""
        served = router.current
        kind = request.headers.get("content-type", "")
        images = protocol.read_invocation(await request.body(), kind, served.about.image_shape, limits.max_images)
        answer = await router.answer(images, request.headers.get(REQUEST_ID), served)
        return _answer(request, protocol.invocation_answer(answer.probabilities), answer)

    async def ping() -> Response:
        """Whether requests are answered."""
        if not router.is_ready:
            raise not_ready("not ready")
        return Response("\n", media_type=JSON)

    async def version() -> Response:
        """The version of MLflow."""
        return Response(mlflow_version, media_type=JSON)

    _add_fast(app, "/invocations", invocations, _INVOCATION)
    app.add_api_route("/ping", ping)
    app.add_api_route("/version", version)


def _add_pages(app: FastAPI, router: Router) -> None:
    uploads = Uploads()

    async def metrics() -> Response:
        """All metrics, in Prometheus' text format."""
        return Response(router.metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def rollout() -> Response:
        """State of the challenger: canary, shadow, or stopped and why."""
        return _json(router.describe_rollout())

    async def picture(request: Request) -> Response:
        """Classify an uploaded image, PNG or JPEG, after converting it into the form of the training images."""
        served = router.current
        image = await uploads.read(await request.body(), served.about)
        answer = await router.answer(image[None], request.headers.get(REQUEST_ID), served)
        return _answer(request, uploads.answer(image, answer), answer)

    async def docs() -> Response:
        """This page."""
        from gradtrail.serving.server.docs_page import docs_page

        return Response(docs_page(app.openapi(), router), media_type="text/html", headers=_HEADERS)

    app.add_api_route("/metrics", metrics)
    app.add_api_route("/rollout", rollout)
    app.add_api_route("/picture", picture, methods=["POST"], summary="Classify an image", openapi_extra=_PICTURE)
    app.add_api_route("/docs", docs)
    for path, (name, kind) in _PAGE.items():
        app.add_api_route(path, _file(name, kind), include_in_schema=False)


def _file(name: str, kind: str) -> _Endpoint:
    content = (_FOLDER / name).read_bytes()

    async def send() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return send


def _ready(router: Router) -> Response:
    if not router.is_ready:
        raise not_ready("the server is shutting down" if router.is_draining else "the model is being loaded")
    return _json({"ready": True})


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(protocol.to_json(content), status, media_type=JSON)


def _answer(request: Request, body: bytes, answer: Answer) -> Response:
    request.scope["gradtrail.is_first"] = answer.is_first
    return Response(body, media_type=JSON, headers={VERSION_HEADER: answer.model.version})


async def _answer_refusal(_: Request, refusal: Refusal) -> Response:
    return Response(refusal.body, refusal.status, refusal.headers, JSON)


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return await _answer_refusal(request, Refusal(404, "no such endpoint; /docs lists them"))
    return await _answer_refusal(request, Refusal(error.status_code, error.detail, error.headers))


async def _answer_failure(request: Request, _: Exception) -> Response:
    """Answer in one line; the guard gets the exception too, and logs it."""
    return await _answer_refusal(request, Refusal(500, "the server failed; its log says why"))


def _counter(metrics: ServerMetrics) -> Callable[[Any, int, float], None]:
    def observe(scope: Any, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "")
        metrics.request(route, status, seconds, is_cold=scope.get("gradtrail.is_first", False))
        if status >= 400:
            metrics.error(_ERRORS.get(status, "failed"))

    return observe


_INFERENCE = {"inputs": [{"name": "images", "shape": [1, 28, 28], "datatype": "UINT8", "data": [0, "…", 255]}]}
_INVOCATION = {"inputs": [[[0, "…", 255], "…"]]}
_PICTURE = {"requestBody": {"required": True, "content": {"image/png": {}, "image/jpeg": {}}}}
