"""Requests share batches of the compiled sizes, and each gets its own answer."""

import asyncio
import threading
from typing import Any, cast

import numpy as np
import pytest
from asgi import CLASSES, SHAPE, SIZES, FakeModel, shares
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.serving.server.batching import Batcher, BatchingConfig, BatchRun
from gradtrail.serving.server.refusal import Refusal
from gradtrail.stages.artifacts.exported import ExportedModel
from gradtrail.support.errors import UserError


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), dtype=np.uint8)


def batcher(model: FakeModel, runs: list[BatchRun] | None = None, **config: Any) -> Batcher:
    observe = runs.append if runs is not None else None
    return Batcher(cast(ExportedModel, model), BatchingConfig(**config), observe)


async def test_answer_without_probabilities_fails_only_its_request() -> None:
    gate = Gate()

    def wrong_for_white(batch: np.ndarray) -> np.ndarray:
        return np.where((batch[:, :1, 0] == 255), np.float32(np.nan), gate(batch))

    model = FakeModel(wrong_for_white)
    queue = batcher(model, max_wait_ms=0)
    white = np.full((1, *SHAPE), 255, np.uint8)
    first = asyncio.create_task(queue.predict(images(1) // 2))
    await gate.is_entered()
    tasks = [asyncio.create_task(queue.predict(sent)) for sent in (images(2) // 2, white, images(1) // 2)]
    await asyncio.sleep(0)
    gate.opened.set()
    answers = await asyncio.gather(first, *tasks, return_exceptions=True)
    assert model.batches == [1, 4]
    assert [len(answer) if isinstance(answer, np.ndarray) else type(answer) for answer in answers] == [
        *(1, 2, UserError, 1)
    ]
    queue.close()


class Gate:
    """A model's function that waits until the gate is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        self.entered.set()
        assert self.opened.wait(60)
        return shares(batch)

    async def is_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 60)


@given(st.lists(st.integers(0, 30), max_size=12), st.sampled_from([0.0, 2.0]))
def test_every_request_gets_the_answer_for_its_own_images(counts: list[int], max_wait_ms: float) -> None:
    model, runs = FakeModel(), list[BatchRun]()

    async def main() -> list[np.ndarray]:
        queue = batcher(model, runs, max_wait_ms=max_wait_ms)
        answers = await asyncio.gather(*(queue.predict(images(count, seed)) for seed, count in enumerate(counts)))
        queue.close()
        assert (queue.num_images, queue.num_waiting) == (0, 0)
        return answers

    for seed, (count, answer) in enumerate(zip(counts, asyncio.run(main()), strict=True)):
        np.testing.assert_array_equal(answer, shares(images(count, seed)).reshape(count, len(CLASSES)))
    assert {*model.batches} <= {*SIZES}
    assert sum(run.num_images for run in runs) == sum(counts)
    assert all(run.num_images <= run.size for run in runs)
    assert sum(len(run.queue_seconds) for run in runs) == sum(count > 0 for count in counts)


async def test_requests_during_a_batch_share_the_next_one() -> None:
    gate, runs = Gate(), list[BatchRun]()
    model = FakeModel(gate)

    queue = batcher(model, runs)
    first = asyncio.create_task(queue.predict(images(1)))
    await gate.is_entered()
    tasks = [asyncio.create_task(queue.predict(images(1, seed))) for seed in range(6)]
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(first, *tasks)
    assert [(run.size, run.num_requests) for run in runs] == [(1, 1), (8, 6)]
    assert [len(run.queue_seconds) for run in runs] == [1, 6]


async def test_single_client_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = batcher(FakeModel(), max_wait_ms=1000)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda *_: pytest.fail("waits"))
    for seed in range(20):
        await queue.predict(images(1, seed))


async def test_concurrent_clients_share_batches() -> None:
    runs: list[BatchRun] = []

    queue = batcher(FakeModel(), runs, max_wait_ms=50)
    for _ in range(4):
        runs.clear()
        await asyncio.gather(*(queue.predict(images(1, seed)) for seed in range(5)))
    assert max(run.num_requests for run in runs) >= 4
    await queue.predict(images(1))  # it waits once, as the others are gone, and is answered


async def test_exception_of_the_model_reaches_only_requests_of_its_batch() -> None:
    def fail_on_zero(batch: np.ndarray) -> np.ndarray:
        if not batch[0].any():
            raise RuntimeError("broken")
        return shares(batch)

    queue = batcher(FakeModel(fail_on_zero))
    with pytest.raises(RuntimeError, match="broken"):
        await queue.predict(np.zeros((20, *SHAPE), np.uint8))  # in three parts
    assert (queue.num_images, queue.num_waiting) == (0, 0)
    np.testing.assert_array_equal(await queue.predict(images(3)), shares(images(3)))


async def test_cancelled_request_is_not_run() -> None:
    gate, runs = Gate(), list[BatchRun]()

    queue = batcher(FakeModel(gate), runs)
    first = asyncio.create_task(queue.predict(images(1)))
    await gate.is_entered()
    gone, stays = (asyncio.create_task(queue.predict(images(count))) for count in (3, 1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    assert queue.num_images == 1
    gate.opened.set()
    await asyncio.gather(first, stays)
    assert [run.num_images for run in runs] == [1, 1]


async def test_full_queue_refuses_requests_and_answers_the_others() -> None:
    gate = Gate()

    queue = batcher(FakeModel(gate), max_queue_images=10)
    first = asyncio.create_task(queue.predict(images(1)))
    await gate.is_entered()
    waiting = [asyncio.create_task(queue.predict(images(5, seed))) for seed in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Refusal) as refused:
        await queue.predict(images(1))
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    gate.opened.set()
    assert [len(answer) for answer in await asyncio.gather(first, *waiting)] == [1, 5, 5]


async def test_closed_queue_answers_waiting_requests_and_ends_its_thread() -> None:
    gate = Gate()

    before = {*threading.enumerate()}
    queue = batcher(FakeModel(gate))
    tasks = [asyncio.create_task(queue.predict(images(9, seed))) for seed in range(3)]
    await gate.is_entered()
    (thread,) = (new for new in {*threading.enumerate()} - before if new.name.startswith("model"))
    queue.close()
    gate.opened.set()
    assert [len(answer) for answer in await asyncio.gather(*tasks)] == [9, 9, 9]
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
