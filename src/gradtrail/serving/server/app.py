"""The application: endpoints of the open inference protocol and of MLflow's server, metrics, pages."""

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
REQUEST_ID = "x-request-id"  # header by which a client stays with one model; that of the protocol's `id` else
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
_KINDS = {400: "invalid", 401: "unauthorized", 403: "unauthorized", 404: "not_found", 405: "invalid"}
_KINDS |= {413: "too_large", 415: "invalid", 421: "unauthorized", 429: "overloaded", 503: "not_ready", 504: "timeout"}
_KINDS |= {414: "too_large", 499: "invalid"}
_Endpoint = Callable[..., Awaitable[Response]]


def create_app(router: Router, guard: Guard) -> FastAPI:
    """Return the application, and put the guard before it: what is to be served is `guard`.

    Args:
        router: holds the model.
        guard: whose limits count; each request that passes it is counted in the metrics.
    """
    app = FastAPI(
        title="gradtrail serve",
        description="Answers with an exported model: the open inference protocol, and MLflow's scoring server.",
        version=installed("gradtrail"),
        docs_url=None,  # FastAPI's page takes scripts from elsewhere
        redoc_url=None,
    )
    app.add_exception_handler(Refusal, _refused)  # type: ignore[arg-type] # starlette's type says Exception
    app.add_exception_handler(HTTPException, _unknown)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _failed)
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
        """Whether requests are answered: the model is compiled for all batch sizes, and no shutdown has begun."""
        return _ready(router)

    async def about(name: str, version: str | None = None) -> Response:
        """Inputs, outputs and classes of the model."""
        served = router.find(name, version)
        return _json(protocol.metadata(served.about, served.version))

    async def model_ready(name: str, version: str | None = None) -> Response:
        """Whether this model answers."""
        served = router.find(name, version)
        return _json(
            {"name": name, "ready": router.is_ready, "version": served.version}, 200 if router.is_ready else 503
        )

    async def infer(request: Request) -> Response:
        """Classify images: one tensor `images`, UINT8 or FP32 from 0 to 1, of shape [images, height, width]."""
        version = request.path_params.get("version")
        served = router.find(request.path_params["name"], version)
        asked = protocol.read_inference(await request.body(), served.about.image_shape, limits.max_images)
        request_id = request.headers.get(REQUEST_ID) or asked.id
        if version is None:
            answer = await router.answer(asked.images, request_id, served)
        else:  # whoever names a version gets it
            answer = await router.answer_with(served, asked.images)
        body = protocol.inference_answer(asked, answer.probabilities, answer.model.about, answer.model.version)
        return _answer(request, body, answer)

    app.add_api_route("/v2", server)
    app.add_api_route("/v2/health/live", live)
    app.add_api_route("/v2/health/ready", ready)
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        app.add_api_route(path, about)
        app.add_api_route(f"{path}/ready", model_ready)
        _add_fast(app, f"{path}/infer", infer, _INFERENCE)


class _CountedRoute(Route):
    """A route of Starlette that names itself in the scope, as FastAPI's do: metrics count requests by it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.NONE:
            child["route"] = self
        return match, child


def _add_fast(app: FastAPI, path: str, endpoint: _Endpoint, example: dict[str, Any]) -> None:
    """Add an endpoint that is answered by Starlette alone: FastAPI describes it, but would take as long as the rest."""
    app.router.routes.insert(0, _CountedRoute(path, endpoint, methods=["POST"]))
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    body = {"required": True, "content": {JSON: {"schema": {"type": "object"}, "example": example}}}
    described = {"parameters": parameters, "requestBody": body}
    app.add_api_route(path, endpoint, methods=["POST"], openapi_extra=described)


def _add_mlflow(app: FastAPI, router: Router, limits: Limits) -> None:
    """Add what MLflow's scoring server has."""
    mlflow_version = installed("mlflow")

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

    async def tell_metrics() -> Response:
        """All metrics, in Prometheus' text format."""
        return Response(router.metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def rollout() -> Response:
        """State of the challenger: whether it answers, is compared, or was stopped and why."""
        return _json(router.describe_rollout())

    async def picture(request: Request) -> Response:
        """Classify an uploaded image, PNG or JPEG, after bringing it into the form of the training images."""
        served = router.current
        image = await uploads.read(await request.body(), served.about)
        answer = await router.answer(image[None], request.headers.get(REQUEST_ID), served)
        return _answer(request, uploads.answer(image, answer), answer)

    async def docs() -> Response:
        """This page."""
        from gradtrail.serving.server.docs_page import docs_page

        return Response(docs_page(app.openapi(), router), media_type="text/html", headers=_HEADERS)

    app.add_api_route("/metrics", tell_metrics)
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
        raise not_ready("the server is ending" if router.is_draining else "the model is being loaded")
    return _json({"ready": True})


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(protocol.to_json(content), status, media_type=JSON)


def _answer(request: Request, body: bytes, answer: Answer) -> Response:
    request.scope["gradtrail.is_first"] = answer.is_first
    return Response(body, media_type=JSON, headers={VERSION_HEADER: answer.model.version})


async def _refused(_: Request, refusal: Refusal) -> Response:
    return Response(refusal.body, refusal.status, refusal.headers, JSON)


async def _unknown(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return await _refused(request, Refusal(404, "no such endpoint; /docs lists them"))
    return await _refused(request, Refusal(error.status_code, error.detail, error.headers))


async def _failed(request: Request, _: Exception) -> Response:
    """Answer in one line; the guard, which gets the exception too, writes it to the log."""
    return await _refused(request, Refusal(500, "the server failed; its log says why"))


def _counter(metrics: ServerMetrics) -> Callable[[Any, int, float], None]:
    def observe(scope: Any, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "")
        metrics.request(route, status, seconds, is_cold=scope.get("gradtrail.is_first", False))
        if status >= 400:
            metrics.error(_KINDS.get(status, "failed"))

    return observe


_INFERENCE = {"inputs": [{"name": "images", "shape": [1, 28, 28], "datatype": "UINT8", "data": [0, "…", 255]}]}
_INVOCATION = {"inputs": [[[0, "…", 255], "…"]]}
_PICTURE = {"requestBody": {"required": True, "content": {"image/png": {}, "image/jpeg": {}}}}
