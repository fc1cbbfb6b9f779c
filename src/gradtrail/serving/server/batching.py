"""Collects the images of several requests into batches of the compiled sizes.

One batch runs at a time, in its own thread, or, if it is short and has a single request, in the event loop: the way to
the thread and back takes longer. Requests that arrive meanwhile are collected for the next one. A batch that
could start waits for more requests only if the last one answered several: until there are as many again, for at most
`max_wait_ms`. So a single client never waits, and concurrent clients share batches.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, UInt8
from starlette.exceptions import HTTPException

from gradtrail.serving.metrics import ServerMetrics
from gradtrail.stages.model.exported import ExportedModel, probability_fault

Images: TypeAlias = UInt8[np.ndarray, "images height width *channels"]
Probabilities: TypeAlias = Float[np.ndarray, "images classes"]

THREAD = "model"  # prefix of the names of threads that answer


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How requests are collected."""

    max_wait_ms: float = 2.0  # longest wait of a batch for more requests; 0 for no wait
    max_queue_images: int = 4096  # limit of waiting images; a request beyond it is refused


@dataclass(eq=False)
class _Request:
    """A request, or a part of one that is larger than the largest batch."""

    images: Images
    answer: asyncio.Future[Probabilities]
    arrived: float


class Batcher:
    """Runs one model for all requests, in batches of `sizes`, ascending; made and used in a running event loop."""

    def __init__(self, model: ExportedModel, config: BatchingConfig, metrics: ServerMetrics, sizes: Sequence[int]):
        self.sizes = tuple(sizes)  # sizes that the model is compiled for; more may be added at any time
        self.short_sizes = set[int]()  # sizes that run in less time than the way to the thread and back
        self.queue: deque[_Request] = deque()  # requests that are not in a batch yet
        self.num_images = 0  # images in the queue
        self._model, self._config, self._metrics = model, config, metrics
        self._loop = asyncio.get_running_loop()
        self._thread: ThreadPoolExecutor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = self._is_closing = False
        self._started = 0.0  # time at which the last batch started
        self._expected = 1  # number of requests to wait for

    async def predict(self, images: Images) -> Probabilities:
        """Return the probabilities of any number of images; raise HTTPException (429) if too many images wait.

        An exception of the model is raised too, and UserError if its answers are no probabilities.
        """
        if not len(images):
            return np.zeros((0, len(self._model.manifest.classes)), np.float32)
        if self.num_images and self.num_images + len(images) > self._config.max_queue_images:
            raise HTTPException(429, f"{self.num_images:,} images wait already; try again")
        largest, now = self.sizes[-1], time.perf_counter()
        parts = [images[start : start + largest] for start in range(0, len(images), largest)]
        requests = [_Request(part, self._loop.create_future(), now) for part in parts]
        self.queue.extend(requests)
        self.num_images += len(images)
        self._start_or_wait()
        try:
            answers = [await request.answer for request in requests]
        except BaseException:  # cancelled, or a part failed: the other parts are not run
            for request in requests:
                request.answer.cancel()
                if request in self.queue:
                    self.queue.remove(request)
                    self.num_images -= len(request.images)
            self._end_if_idle()
            raise
        return answers[0] if len(answers) == 1 else np.concatenate(answers)

    @property
    def running_seconds(self) -> float:
        """Seconds since the batch that runs started; 0 if none runs."""
        return time.perf_counter() - self._started if self._is_running else 0.0

    def close(self) -> None:
        """End the thread once all waiting requests are answered."""
        self._is_closing = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._is_closing and self._thread and not (self.queue or self._is_running):
            self._thread.shutdown(wait=False)
            self._thread = None

    def _start_or_wait(self) -> None:
        if self._is_running or not self.queue:
            return
        left = self._config.max_wait_ms / 1000 - (time.perf_counter() - self.queue[0].arrived)
        if left <= 0 or len(self.queue) >= self._expected or self.num_images >= self.sizes[-1]:
            self._start()
        elif self._timer is None:
            self._timer = self._loop.call_later(left, self._start)

    def _start(self) -> None:
        """Hand the next batch to the thread."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._is_running or not self.queue:
            return
        requests, count = list[_Request](), 0
        while self.queue and count + len(self.queue[0].images) <= self.sizes[-1]:
            requests.append(self.queue.popleft())
            count += len(requests[-1].images)
        self.num_images -= count
        self._is_running, self._started = True, time.perf_counter()
        if len(requests) == 1 and self._size_for(count) in self.short_sizes:
            self._run(requests, count)
            return
        if self._thread is None:  # also for a request that arrived before its model was replaced
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        try:
            self._thread.submit(self._run, requests, count)
        except RuntimeError as error:  # of the system, at its limit of threads
            self._thread = None  # it would run the batch later, a second time
            refusals = [HTTPException(503, f"the model's thread did not start: {error}; try again")] * len(requests)
            self._loop.call_soon(self._finish, requests, refusals, self._size_for(count), self._started)

    def _size_for(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _run(self, requests: Sequence[_Request], count: int) -> None:
        """Run a batch."""
        manifest, started, size = self._model.manifest, time.perf_counter(), self._size_for(count)
        answers: list[Probabilities | Exception] = []
        try:
            batch, row = np.zeros((size, *manifest.image_shape), np.uint8), 0
            for request in requests:
                batch[row : row + len(request.images)] = request.images
                row += len(request.images)
            probabilities, row = np.asarray(self._model.run(batch)), 0
            is_faulty = probability_fault(probabilities[:count], manifest) is not None
            for request in requests:  # a fault fails only the requests that have it
                answer = probabilities[row : row + len(request.images)]
                fault = probability_fault(answer, manifest) if is_faulty else None
                answers.append(fault or answer)
                row += len(request.images)
        except Exception as error:
            answers = [error] * len(requests)
        self._loop.call_soon_threadsafe(self._finish, requests, answers, size, started)

    def _finish(
        self, requests: Sequence[_Request], answers: Sequence[Probabilities | Exception], size: int, started: float
    ) -> None:
        """Answer the requests of a batch, in the event loop, and start the next one."""
        self._is_running = False
        self._expected = min(len(requests) + len(self.queue), self.sizes[-1])
        for request, answer in zip(requests, answers, strict=True):
            if request.answer.done():  # cancelled
                continue
            if isinstance(answer, Exception):
                request.answer.set_exception(answer)
            else:
                request.answer.set_result(answer)
        self._start_or_wait()
        self._metrics.batch_fill.labels(str(size)).observe(sum(len(request.images) for request in requests) / size)
        for request in requests:
            self._metrics.queue_wait_seconds.observe(started - request.arrived)
        self._end_if_idle()
