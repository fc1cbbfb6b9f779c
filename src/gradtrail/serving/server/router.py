"""Which model answers: one is current, and is replaced without a lost request.

A model is loaded and warmed up beside the one that answers; then requests go to the new one, and those that began with
the old one end with it. Which model gets a request is up to the `Rollout`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, UInt8

from gradtrail.serving.server.batching import Batcher, BatchingConfig, BatchRun
from gradtrail.serving.server.refusal import Refusal, not_ready
from gradtrail.stages.artifacts.exported import ExportedModel, Manifest, probability_fault, read_export

Images = UInt8[np.ndarray, "images height width"]
Probabilities = Float[np.ndarray, "images classes"]
_WARM_UP = (0, 255)  # pixels of the images that a model answers before it is ready: blank and full
_SHORT = 12  # characters of a digest that stand for a version where the registry gave none


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from.

    Attributes:
        folder: with the export.
        version: in the registry; empty for a folder, whose version is the digest's beginning.
    """

    folder: Path
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class CompiledSize:
    """A batch size that was made ready: its size, the seconds that took, and whether the compile cache had it."""

    size: int
    seconds: float
    is_cached: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A model that is compiled and warmed up, but answers nobody yet."""

    model: ExportedModel
    version: str
    sizes: tuple[CompiledSize, ...]


@dataclass(kw_only=True, eq=False)
class Served:
    """A model that answers requests.

    Attributes:
        about: its manifest.
        version: in the registry, or the beginning of the digest.
        digest: of the manifest.
        batcher: that runs it.
        num_answered: requests so far.
    """

    about: Manifest
    version: str
    digest: str
    batcher: Batcher
    num_answered: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Probabilities, the model that gave them, and whether they are its first."""

    probabilities: Probabilities
    by: Served
    is_first: bool = False


class Rollout(Protocol):
    """Decides which model answers a request: the place of canary and shadow."""

    async def answer(self, images: Images, request_id: str | None, current: Served) -> Answer:
        """Answer one request, by `current` or by a challenger; see `answer_by`."""

    def about(self) -> dict[str, Any]:
        """What `GET /rollout` answers."""


class Watcher(Protocol):
    """Is told what the router does; every method is called in the event loop."""

    def loaded(self, loaded: Loaded) -> None:
        """A model was made ready."""

    def swapped(self, served: Served) -> None:
        """A model became the current one."""

    def batch(self, run: BatchRun, num_waiting: int) -> None:
        """A batch was run; `num_waiting` requests wait for the next."""

    def answered(self, answer: Answer, seconds: float) -> None:
        """The current model answered a request, in this time."""

    def failed(self, served: Served) -> None:
        """The current model raised."""


@dataclass(kw_only=True)
class Router:
    """Holds the current model; made and used in one event loop.

    Attributes:
        batching: how requests are gathered.
        watcher: that is told what happens.
        rollout: that decides who answers; None for the current model always.
        is_draining: whether the server is about to end, and is no longer ready.
    """

    batching: BatchingConfig
    watcher: Watcher | None = None
    rollout: Rollout | None = None
    is_draining: bool = False
    _current: Served | None = field(default=None, init=False)

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered, and new clients are welcome."""
        return self._current is not None and not self.is_draining

    @property
    def current(self) -> Served:
        """The model that answers.

        Raises:
            Refusal: none is loaded yet (503).
        """
        if self._current is None:
            raise not_ready("the model is being loaded; try again in a moment")
        return self._current

    def find(self, name: str, version: str | None = None) -> Served:
        """Return the model of this name, and version if one is given.

        Raises:
            Refusal: another one answers here (404), or none yet (503).
        """
        current = self.current
        if name != current.about.name:
            raise Refusal(404, f"no model {name!r} here; it is {current.about.name!r}")
        if version not in (None, current.version):
            raise Refusal(404, f"no version {version!r} of {name!r} here; it is {current.version!r}")
        return current

    async def answer(self, images: Images, request_id: str | None, served: Served) -> Answer:
        """Answer a request that found `served`; a rollout may give it to another model.

        Raises:
            Refusal: too much waits (429).
            Exception: what the model raised, or UserError for answers that are no probabilities.
        """
        if self.rollout is None:
            return await self.answer_by(served, images)
        return await self.rollout.answer(images, request_id, served)

    async def answer_by(self, served: Served, images: Images) -> Answer:
        """Answer a request by this model, and tell the watcher."""
        started = time.perf_counter()
        try:
            probabilities = await served.batcher.predict(images)
        except Refusal:
            raise
        except Exception:
            if self.watcher:
                self.watcher.failed(served)
            raise
        answer = Answer(probabilities=probabilities, by=served, is_first=not served.num_answered)
        served.num_answered += 1
        if self.watcher:
            self.watcher.answered(answer, time.perf_counter() - started)
        return answer

    async def load(self, source: Source) -> Served:
        """Load and warm up a model beside the one that answers.

        Raises:
            UserError: it cannot be used here; one line.
        """
        loaded = await asyncio.to_thread(load, source)
        if self.watcher:
            self.watcher.loaded(loaded)
        return self.serve(loaded)

    def serve(self, loaded: Loaded) -> Served:
        """Give a model that is warmed up a queue and a thread."""
        about = loaded.model.manifest
        return Served(
            about=about,
            version=loaded.version,
            digest=about.digest,
            batcher=Batcher(loaded.model, self.batching, self._observe),
        )

    def swap(self, served: Served) -> None:
        """Send requests to this model from now on; the old one answers what it has, and ends."""
        old, self._current = self._current, served
        if self.watcher:
            self.watcher.swapped(served)
        if old is not None and old is not served:
            old.batcher.close()

    def close(self) -> None:
        """End the current model's thread once everything that waits is answered."""
        if self._current is not None:
            self._current.batcher.close()

    def _observe(self, run: BatchRun) -> None:
        if self.watcher:
            self.watcher.batch(run, self._current.batcher.num_waiting if self._current else 0)


def load(source: Source, clock: Callable[[], float] = time.perf_counter) -> Loaded:
    """Read an exported model, compile it for all sizes of its manifest, and run it for each.

    Raises:
        UserError: it cannot be used here, or answers no probabilities; one line.
    """
    from gradtrail.core.xla.compile_events import cache_hits

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
