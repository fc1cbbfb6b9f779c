"""The current model answers all requests, and is replaced without losing one.

A model is loaded and warmed up alongside the current one; then new requests go to it, and those that began with the old
model end with it. The first model answers once its smallest batch size is compiled; the others follow one by one. A
trial (`serving/rollout`) extends the router by a challenger.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from gradtrail.serving.metrics import ServerMetrics
from gradtrail.serving.server.batching import Batcher, BatchingConfig, Images, Probabilities
from gradtrail.stages.model.exported import ExportedModel, Manifest, probability_fault, read_export
from gradtrail.support.errors import UserError, one_line

LOG = logging.getLogger("gradtrail.serve")
_SHORT_SECONDS = 0.001  # run time of a batch that may delay other requests
_WARM_UP = (0, 255)  # pixels of the images that each compiled size answers before it is used: blank and full


@dataclass(kw_only=True, eq=False)
class Served:
    """A model with its queue and thread."""

    model: ExportedModel
    about: Manifest
    version: str  # version in the registry, or the beginning of the digest
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
        """The model that answers; raises HTTPException (503) if none is loaded yet."""
        if self._current is None:
            raise HTTPException(503, "the model is being loaded; try again in a moment")
        return self._current

    def find(self, name: str, version: str | None = None) -> Served:
        """Return the current model if it has this name and version; raise HTTPException (404, 503) otherwise."""
        current = self.current
        if name != current.about.name:
            raise HTTPException(404, f"no model {name!r} here; it is {current.about.name!r}")
        if version not in (None, current.version):
            raise HTTPException(404, f"no version {version!r} of {name!r} here; it is {current.version!r}")
        return current

    async def answer(self, images: Images, request_id: str | None, current: Served) -> Answer:  # noqa: ARG002 - of `TrialRouter`
        """Answer a request by the model that was current when it arrived; see `Batcher.predict` for what it raises."""
        return await self.answer_with(current, images)

    async def answer_with(self, served: Served, images: Images) -> Answer:
        """Answer a request by this model, and count it in the metrics of the primary model."""
        started = time.perf_counter()
        try:
            probabilities = await served.batcher.predict(images)
        except HTTPException:
            raise
        except Exception as error:
            self.metrics.failed("primary", served.version, error)
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

    async def load(self, folder: Path, version: str = "", *, precision: str = "", all_sizes: bool = True) -> Served:
        """Read an exported model, and compile it for all batch sizes, or the smallest one, alongside the current one.

        In a precision other than its own, it is a version such as `3-bfloat16`.

        Raises:
            UserError: The model cannot be used here, or its answers are no probabilities; one line.
        """
        model = await asyncio.to_thread(read_export, folder, precision)
        version = version or model.manifest.digest[:12]
        served = self.host(model, f"{version}-{precision}" if precision else version, sizes=())
        for size in served.about.batch_sizes if all_sizes else served.about.batch_sizes[:1]:
            await self._add_size(served, size)
        _log_cache_faults()
        return served

    async def add_remaining_sizes(self, served: Served) -> None:
        """Compile the other sizes of a model that answers already; one that fails is logged, and not used."""
        for size in served.about.batch_sizes[len(served.batcher.sizes) :]:
            if self._current is not served:
                return
            try:
                await self._add_size(served, size)
            except Exception as error:
                bug = None if isinstance(error, UserError) else error
                LOG.warning("batches of %d are not used: %s", size, one_line(error), exc_info=bug)
        _log_cache_faults()
        LOG.info("answers in batches of %s", ", ".join(map(str, served.batcher.sizes)))

    async def _add_size(self, served: Served, size: int) -> None:
        seconds, is_cached, run_seconds = await asyncio.to_thread(_compile, served.model, size)
        self.metrics.compile_seconds.labels(str(size), "hit" if is_cached else "miss").observe(seconds)
        served.batcher.sizes += (size,)
        if run_seconds < _SHORT_SECONDS:
            served.batcher.short_sizes.add(size)

    def host(self, model: ExportedModel, version: str, sizes: tuple[int, ...] | None = None) -> Served:
        """Give a model a queue and a thread; it is compiled for `sizes`, or all sizes of its manifest."""
        about = model.manifest
        batcher = Batcher(model, self.batching, self.metrics, about.batch_sizes if sizes is None else sizes)
        return Served(model=model, about=about, version=version or about.digest[:12], batcher=batcher)

    def swap(self, served: Served) -> None:
        """Send new requests to this model; the old one answers those that it has, and ends."""
        old, self._current = self._current, served
        self.metrics.classes = served.about.classes
        self.metrics.serving("primary", served.about.name, served.version, served.about.digest)
        self.metrics.queue_requests.set_function(lambda: len(served.batcher.queue))
        if old is not None and old is not served:
            old.batcher.close()

    def close(self) -> None:
        """End the current model's thread once all waiting requests are answered."""
        if self._current is not None:
            self._current.batcher.close()


def _log_cache_faults() -> None:
    from gradtrail.stages.common.setup import take_cache_faults

    for line in take_cache_faults()[1]:
        LOG.warning(line)


def _compile(model: ExportedModel, size: int) -> tuple[float, bool, float]:
    """Compile a batch size and answer images with it.

    Returns the seconds of compiling, whether the compile cache had the program, and the seconds of the last run.
    """
    from gradtrail.core.xla.compile_log import cache_hits

    started = time.perf_counter()
    with cache_hits() as hits:
        model.compile(size)
    seconds = time.perf_counter() - started
    for pixel in _WARM_UP:
        started = time.perf_counter()
        answers = np.asarray(model.run(np.full((size, *model.manifest.image_shape), pixel, np.uint8)))
        run_seconds = time.perf_counter() - started
        if fault := probability_fault(answers, model.manifest):
            raise fault
    return seconds, bool(hits), run_seconds
