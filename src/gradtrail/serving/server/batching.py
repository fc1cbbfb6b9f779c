"""Collects the images of several requests into batches of the compiled sizes.

One batch runs at a time, in its own thread; requests that arrive meanwhile are collected for the next one. A batch that
could start waits for more requests only if the last one answered several: until there are as many again, for at most
`max_wait_ms`. So a single client never waits, and concurrent clients share batches.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated

import numpy as np
from jaxtyping import Float, UInt8

from gradtrail.core.config import Bounds, config
from gradtrail.serving.server.refusal import busy
from gradtrail.stages.artifacts.exported import ExportedModel, probability_fault

Images = UInt8[np.ndarray, "images height width"]
Probabilities = Float[np.ndarray, "images classes"]


THREAD = "model"  # prefix of the names of threads that answer


@config
class BatchingConfig:
    """How requests are collected."""

    # longest wait of a batch for more requests; 0 for no wait
    max_wait_ms: Annotated[float, Bounds(at_least=0, at_most=1000)] = 2.0
    # limit of waiting images; a request beyond it is refused
    max_queue_images: Annotated[int, Bounds(at_least=1, at_most=10**6)] = 4096


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """A finished batch."""

    size: int  # compiled size
    num_images: int
    num_requests: int  # number of requests that it answered, also in parts
    queue_seconds: tuple[float, ...]  # waiting time of each request whose first images are in the batch
    run_seconds: float  # run time of the model


@dataclass(eq=False)
class _Request:
    images: Images
    answer: asyncio.Future[Probabilities]
    arrived: float
    num_started: int = 0  # images that are in a batch
    parts: list[Probabilities] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.images) - self.num_started


@dataclass(frozen=True)
class _Span:
    """Consecutive images of a request in one batch."""

    request: _Request
    start: int
    stop: int


class Batcher:
    """Runs one model for all requests; made and used in a running event loop.

    Args:
        model: Model that is compiled for all sizes of its manifest.
        config: How requests are collected.
        observe: Function that is called in the event loop after each batch.
    """

    def __init__(self, model: ExportedModel, config: BatchingConfig, observe: Callable[[BatchRun], None] | None = None):
        self._model, self._config, self._observe = model, config, observe
        self._sizes = model.manifest.batch_sizes
        self._loop = asyncio.get_running_loop()
        self._thread, self._has_ended = _new_thread(), False
        self._queue: deque[_Request] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = self._is_closing = False
        self._expected = 1
        self.num_images = 0

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not completely in a batch yet; `num_images` counts their images."""
        return len(self._queue)

    @property
    def num_ahead(self) -> int:
        """Number of requests before the next one; the running batch counts as one."""
        return len(self._queue) + self._is_running

    async def predict(self, images: Images) -> Probabilities:
        """Return the probabilities of any number of images.

        Raises:
            Refusal: Too many images wait (429).
            UserError: The answers of the model are no probabilities.
            Exception: Any exception of the model.
        """
        if not len(images):
            return np.zeros((0, len(self._model.manifest.classes)), np.float32)
        if self.num_images and self.num_images + len(images) > self._config.max_queue_images:
            raise busy(f"{self.num_images:,} images wait already; try again")
        request = _Request(images, self._loop.create_future(), time.perf_counter())
        self._queue.append(request)
        self.num_images += len(images)
        self._start_or_wait()
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._remove(request)
            raise

    def close(self) -> None:
        """End the thread once all waiting requests are answered."""
        self._is_closing = True
        self._end_if_idle()

    def _remove(self, request: _Request) -> None:
        """Remove a cancelled request from the queue."""
        if request in self._queue:
            self._queue.remove(request)
            self.num_images -= request.num_left
        self._end_if_idle()

    def _start_or_wait(self) -> None:
        if self._is_running or not self._queue:
            return
        waited = time.perf_counter() - self._queue[0].arrived
        left = self._config.max_wait_ms / 1000 - waited
        if left <= 0 or len(self._queue) >= self._expected or self.num_images >= self._sizes[-1]:
            self._start()
        elif self._timer is None:
            self._timer = self._loop.call_later(left, self._start)

    def _start(self) -> None:
        """Hand the next batch to the thread."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._is_running or not self._queue:
            return
        spans = self._next_spans()
        self._is_running = True
        if self._has_ended:  # a request that arrived before this model was replaced
            self._thread, self._has_ended = _new_thread(), False
        self._thread.submit(self._run, spans)

    def _next_spans(self) -> list[_Span]:
        room, spans = self._sizes[-1], list[_Span]()
        while self._queue and room:
            request = self._queue[0]
            start, count = request.num_started, min(room, request.num_left)
            spans.append(_Span(request, start, start + count))
            request.num_started += count
            room -= count
            self.num_images -= count
            if not request.num_left:
                self._queue.popleft()
        return spans

    def _run(self, spans: Sequence[_Span]) -> None:
        """Run a batch, in the thread."""
        count = sum(span.stop - span.start for span in spans)
        size = next(size for size in self._sizes if size >= count)
        started = time.perf_counter()
        parts: list[Probabilities | Exception]
        try:
            batch = np.zeros((size, *self._model.manifest.image_shape), np.uint8)
            ends = accumulate((span.stop - span.start for span in spans), initial=0)
            rows = [slice(start, stop) for start, stop in pairwise(ends)]
            for span, row in zip(spans, rows, strict=True):
                batch[row] = span.request.images[span.start : span.stop]
            answers = np.asarray(self._model.run(batch))
            parts = [answers[row] for row in rows]
            if probability_fault(answers[:count], self._model.manifest):  # fails only the requests that have it
                parts = [probability_fault(answers[row], self._model.manifest) or answers[row] for row in rows]
        except Exception as error:
            parts = [error] * len(spans)
        run = BatchRun(
            size=size,
            num_images=count,
            num_requests=len(spans),
            queue_seconds=tuple(started - span.request.arrived for span in spans if not span.start),
            run_seconds=time.perf_counter() - started,
        )
        self._loop.call_soon_threadsafe(self._finish, spans, parts, run)

    def _finish(self, spans: Sequence[_Span], parts: Sequence[Probabilities | Exception], run: BatchRun) -> None:
        """Answer the requests of a batch, in the event loop, and start the next one."""
        self._is_running = False
        self._expected = min(len(spans) + len(self._queue), self._sizes[-1])
        for span, part in zip(spans, parts, strict=True):
            self._answer(span.request, part)
        self._start_or_wait()
        if self._observe:
            self._observe(run)
        self._end_if_idle()

    def _answer(self, request: _Request, part: Probabilities | Exception) -> None:
        if request.answer.done():  # its first part failed, or it was cancelled
            return
        if isinstance(part, Exception):
            request.answer.set_exception(part)
            self._remove(request)
            return
        request.parts.append(part)
        if sum(map(len, request.parts)) == len(request.images):
            request.answer.set_result(part if len(request.parts) == 1 else np.concatenate(request.parts))

    def _end_if_idle(self) -> None:
        if self._is_closing and not self._is_running and not self._queue:
            self._thread.shutdown(wait=False)
            self._has_ended = True


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=THREAD)
