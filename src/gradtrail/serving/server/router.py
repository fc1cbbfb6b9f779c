"""The current model answers all requests, and is replaced without losing one.

A model is loaded and warmed up alongside the current one; then new requests go to it, and those that began with the old
model end with it. `serving/rollout` extends the router by a challenger.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.server.batching import Batcher, BatchingConfig, BatchRun
from gradtrail.serving.server.refusal import Refusal, not_ready
from gradtrail.stages.artifacts.exported import ExportedModel, Manifest, probability_fault, read_export

Images = UInt8[np.ndarray, "images height width"]
Probabilities = Float[np.ndarray, "images classes"]
_WARM_UP = (0, 255)  # pixels of the images that a model answers before it is ready: blank and full
_SHORT = 12  # characters of the digest that replace a version if there is none


@dataclass(frozen=True, kw_only=True)
class Source:
    """The origin of a model."""

    folder: Path  # folder with the export
    version: str = ""  # version in the registry; empty for a folder, whose version is the beginning of its digest


@dataclass(frozen=True, kw_only=True)
class CompiledSize:
    """A batch size with the seconds that compiling took, and whether the program came from the compile cache."""

    size: int
    seconds: float
    is_cached: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A model that is compiled and warmed up, but answers no requests yet."""

    model: ExportedModel
    version: str
    sizes: tuple[CompiledSize, ...]


@dataclass(kw_only=True, eq=False)
class Served:
    """A model that answers requests."""

    about: Manifest
    version: str  # version in the registry, or the beginning of the digest
    digest: str
    batcher: Batcher
    num_answered: int = 0  # requests so far


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Probabilities, the model that computed them, and whether they are its first."""

    probabilities: Probabilities
    model: Served
    is_first: bool = False


@dataclass(kw_only=True)
class Router:
    """Holds the current model; made and used in one event loop."""

    batching: BatchingConfig
    metrics: ServerMetrics
    is_draining: bool = False  # whether the server is shutting down, and is no longer ready
    _current: Served | None = field(default=None, init=False)

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered, and new clients are welcome."""
        return self._current is not None and not self.is_draining

    @property
    def current(self) -> Served:
        """The model that answers.

        Raises:
            Refusal: No model is loaded yet (503).
        """
        if self._current is None:
            raise not_ready("the model is being loaded; try again in a moment")
        return self._current

    def find(self, name: str, version: str | None = None) -> Served:
        """Return the current model if it has this name, and this version unless it is None.

        Raises:
            Refusal: Another model answers here (404), or none yet (503).
        """
        current = self.current
        if name != current.about.name:
            raise Refusal(404, f"no model {name!r} here; it is {current.about.name!r}")
        if version not in (None, current.version):
            raise Refusal(404, f"no version {version!r} of {name!r} here; it is {current.version!r}")
        return current

    async def answer(self, images: Images, request_id: str | None, current: Served) -> Answer:  # noqa: ARG002 - of `Trial`
        """Answer a request by the model that was current when it arrived.

        Args:
            images: The images of the request.
            request_id: The client's id; None if it sent none.
            current: The model that `find` returned for the request.

        Raises:
            Refusal: Too many requests wait (429).
            Exception: An exception of the model, or UserError if its answers are no probabilities.
        """
        return await self.answer_with(current, images)

    async def answer_with(self, served: Served, images: Images) -> Answer:
        """Answer a request by this model, and count it in the metrics of the primary model."""
        started = time.perf_counter()
        try:
            probabilities = await served.batcher.predict(images)
        except Refusal:
            raise
        except Exception:
            self.metrics.failed("primary", served.version)
            raise
        answer = Answer(probabilities=probabilities, model=served, is_first=not served.num_answered)
        served.num_answered += 1
        labels = probabilities.argmax(axis=1).tolist()
        confidences = probabilities.max(axis=1).tolist() if labels else []
        self.metrics.answered("primary", served.version, time.perf_counter() - started, labels, confidences)
        return answer

    def describe_rollout(self) -> dict[str, Any]:
        """Return the answer of `GET /rollout`."""
        return {"state": "off"}

    async def load(self, source: Source) -> Served:
        """Load and warm up a model alongside the current one.

        Raises:
            UserError: The model cannot be used here; one line.
        """
        loaded = await asyncio.to_thread(load, source)
        for size in loaded.sizes:
            self.metrics.compiled(size.size, size.seconds, from_cache=size.is_cached)
        return self.serve(loaded)

    def serve(self, loaded: Loaded) -> Served:
        """Give a loaded model a queue and a thread."""
        about = loaded.model.manifest
        return Served(
            about=about,
            version=loaded.version,
            digest=about.digest,
            batcher=Batcher(loaded.model, self.batching, self._observe),
        )

    def swap(self, served: Served) -> None:
        """Send new requests to this model; the old one answers those that it has, and ends."""
        old, self._current = self._current, served
        self.metrics.serving("primary", served.about.name, served.version, served.digest)
        if old is not None and old is not served:
            old.batcher.close()

    def close(self) -> None:
        """End the current model's thread once all waiting requests are answered."""
        if self._current is not None:
            self._current.batcher.close()

    def _observe(self, run: BatchRun) -> None:
        self.metrics.batch(run.num_images, run.size)
        for seconds in run.queue_seconds:
            self.metrics.waited(seconds)
        self.metrics.queue(self._current.batcher.num_waiting if self._current else 0)


def load(source: Source, clock: Callable[[], float] = time.perf_counter) -> Loaded:
    """Read an exported model, compile it for all sizes of its manifest, and run it once for each.

    Raises:
        UserError: The model cannot be used here, or its answers are no probabilities; one line.
    """
    from gradtrail.core.xla.compile_log import cache_hits

    model = read_export(source.folder)
    about = model.manifest
    sizes = []
    for size in about.batch_sizes:
        started = clock()
        with cache_hits() as hits:
            model.compile(size)
        sizes.append(CompiledSize(size=size, seconds=clock() - started, is_cached=bool(hits)))
        for pixel in _WARM_UP:
            answers = model.run(np.full((size, *about.image_shape), pixel, np.uint8))
            if fault := probability_fault(np.asarray(answers), about):
                raise fault
    return Loaded(model=model, version=source.version or about.digest[:_SHORT], sizes=tuple(sizes))
