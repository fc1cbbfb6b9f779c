"""The server without a network: requests are calls of the application, and the model is a plain function."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, cast

import numpy as np
from starlette.types import ASGIApp

from gradtrail.serving.metrics import ServerMetrics
from gradtrail.serving.server.app import create_app
from gradtrail.serving.server.batching import BatchingConfig
from gradtrail.serving.server.middleware import RequestLimits
from gradtrail.serving.server.router import Router, Served
from gradtrail.stages.model.exported import ExportedModel, Manifest
from gradtrail.support.errors import UserError

SHAPE = (4, 3)
CLASSES = ("zero", "one", "two")
SIZES = (1, 4, 8)
JSON = {"content-type": "application/json"}


def manifest(**changes: Any) -> Manifest:
    """Return the manifest of a tiny model."""
    about = {
        "format": 2,
        "name": "digits",
        "model": "mlp-8",
        "weights": "final",
        "epochs": (1,),
        "seeds": (0,),
        "dataset": "digits 00000000",
        "image_shape": SHAPE,
        "classes": CLASSES,
        "temperature": 1.0,
        "validation_images": 100,
        "batch_sizes": SIZES,
        "versions": {},
        "calling_convention": 1,
        "files": {},
    }
    return Manifest(**cast(Any, about | changes))


def shares(images: np.ndarray) -> np.ndarray:
    """Return probabilities that tell images apart: float32 (images, classes)."""
    first = images[:, 0, 0].astype(np.float32) / 255
    return np.stack([first, 1 - first, np.zeros_like(first)], axis=1)


class Gate:
    """A model's function that waits until the gate is opened."""

    def __init__(self, function: Callable[[np.ndarray], np.ndarray] = shares) -> None:
        self.function, self.entered, self.opened = function, threading.Event(), threading.Event()

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        self.entered.set()
        assert self.opened.wait(60)
        return self.function(batch)

    async def is_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 60)


@dataclass
class FakeModel:
    """A model that is a function; it records batch sizes, and accepts only those of its manifest."""

    function: Callable[[np.ndarray], np.ndarray] = shares
    manifest: Manifest = field(default_factory=manifest)
    batches: list[int] = field(default_factory=list)

    def run(self, images: np.ndarray) -> np.ndarray:
        assert len(images) in self.manifest.batch_sizes, "would compile"
        self.batches.append(len(images))
        return self.function(images)

    def served_by(self, router: Router, version: str = "1") -> Served:
        return router.host(cast(ExportedModel, self), version)


@dataclass(frozen=True)
class Reply:
    """An answer as the client received it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Application:
    """The parts of a server, in a running event loop."""

    app: ASGIApp
    router: Router
    metrics: ServerMetrics

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return await ask(self.app, "GET", path, headers=headers)

    async def post(self, path: str, content: Any, headers: Mapping[str, str] | None = None) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return await ask(self.app, "POST", path, [body], JSON | dict(headers or {}))


def application(
    model: FakeModel | None = None,
    *,
    limits: RequestLimits | None = None,
    token: str = "",
) -> Application:
    """Return a server; without a model it is not ready."""
    metrics = ServerMetrics()
    router = Router(batching=BatchingConfig(), metrics=metrics)
    if model:
        router.swap(model.served_by(router))
    app = create_app(router, limits, token=token)
    return Application(app, router, metrics)


async def ask(
    app: ASGIApp,
    method: str,
    path: str,
    parts: Sequence[bytes | EllipsisType | None] = (b"",),
    headers: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Reply:
    """Send a request, and return the answer.

    Args:
        app: ASGI application.
        method: HTTP method.
        path: Decoded path without a query.
        parts: Parts of the body; None if the client disconnects, `...` if it sends nothing any more.
        headers: Headers besides Host; those with several values are sent several times.
    """
    values = {"host": "localhost:8080", **(headers or {})}
    pairs = [(name, each) for name, one in values.items() for each in ((one,) if isinstance(one, str) else one)]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8080),
    }
    waiting = list(parts)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        part = waiting.pop(0) if waiting else ...
        if isinstance(part, EllipsisType):
            await asyncio.sleep(3600)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    with contextlib.suppress(RuntimeError, UserError):  # what a model raises is answered before
        await app(scope, receive, send)
    head, *rest = sent
    assert head["type"] == "http.response.start"
    assert not rest[-1].get("more_body")
    answered = {name.decode(): value.decode("latin-1") for name, value in head["headers"]}
    return Reply(head["status"], answered, b"".join(part.get("body", b"") for part in rest))


def inference(images: np.ndarray, **more: Any) -> dict[str, Any]:
    """Return a request of the open inference protocol."""
    tensor = {"name": "images", "shape": images.shape, "datatype": "UINT8", "data": images.ravel().tolist()}
    return {"inputs": [tensor], **more}


def probabilities(reply: Reply) -> np.ndarray:
    """Return the probabilities in an answer of the open inference protocol, float32 (images, classes)."""
    (tensor,) = (output for output in reply.json["outputs"] if output["name"] == "probabilities")
    return np.array(tensor["data"], np.float32).reshape(tensor["shape"])
