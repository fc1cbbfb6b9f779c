"""Models are replaced under load without a lost request; requests share batches, and each gets its own answer."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from exports import write_small_export
from hypothesis import given
from hypothesis import strategies as st
from in_memory_server import (
    CLASSES,
    SHAPE,
    SIZES,
    Application,
    FakeModel,
    Gate,
    application,
    inference,
    probabilities,
    shares,
)
from starlette.exceptions import HTTPException

from gradtrail.core.xla.compile_log import CompileLog
from gradtrail.serving.metrics import ServerMetrics
from gradtrail.serving.server.batching import Batcher, BatchingConfig
from gradtrail.stages.model.exported import ExportedModel
from gradtrail.support.errors import UserError

NUM_SWAPS = 20
INFER = "/v2/models/digits/infer"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Exports that always answer 3, and always 7."""
    root = tmp_path_factory.mktemp("exports")
    return [write_small_export(root / str(label), always=label, batch_sizes=SIZES) for label in (3, 7)]


async def started(folder: Path) -> Application:
    app = application()
    app.router.swap(await app.router.load(folder, "0"))
    return app


async def test_twenty_swaps_under_load_lose_no_request_and_every_answer_is_of_one_model(folders: list[Path]) -> None:
    labels = {"0": 3}
    num_answers = 0

    async def client(app: Application, seed: int, has_ended: asyncio.Event) -> None:
        nonlocal num_answers
        rng = np.random.default_rng(seed)
        while not has_ended.is_set():
            images = rng.integers(0, 256, (int(rng.integers(1, 20)), 28, 28), dtype=np.uint8)
            reply = await app.post(INFER, inference(images))
            assert reply.status == 200, reply.body
            version = reply.json["model_version"]
            assert reply.headers["gradtrail-model-version"] == version
            assert (probabilities(reply).argmax(axis=1) == labels[version]).all()
            assert len(probabilities(reply)) == len(images)
            num_answers += 1

    app = await started(folders[0])
    models = [(await app.router.load(folder)).model for folder in folders]
    has_ended = asyncio.Event()
    clients = [asyncio.create_task(client(app, seed, has_ended)) for seed in range(4)]
    for number in range(1, NUM_SWAPS + 1):
        labels[str(number)] = (3, 7)[number % 2]
        app.router.swap(app.router.host(models[number % 2], str(number)))
        before = num_answers
        while num_answers < before + 5:
            assert not any(client.done() for client in clients), "a client gave up"
            await asyncio.sleep(0)
    has_ended.set()
    await asyncio.gather(*clients)
    assert app.router.current.version == str(NUM_SWAPS)
    assert f'gradtrail_model_swaps_total{{role="primary"}} {NUM_SWAPS}' in (await app.get("/metrics")).body.decode()


async def test_first_model_answers_with_its_smallest_size_while_the_others_are_compiled(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, go_on, threads = list[int](), threading.Semaphore(1), set[str]()
    compile_size, run = ExportedModel.compile, ExportedModel.run

    def gated(model: ExportedModel, size: int) -> None:
        assert go_on.acquire(timeout=60)
        threads.add(threading.current_thread().name)
        compile_size(model, size)
        compiled.append(size)

    ran: list[int] = []
    monkeypatch.setattr(ExportedModel, "compile", gated)
    monkeypatch.setattr(ExportedModel, "run", lambda model, batch: (ran.append(len(batch)), run(model, batch))[1])
    app = application()
    served = await app.router.load(folders[0], all_sizes=False)
    app.router.swap(served)
    others = asyncio.create_task(app.router.add_remaining_sizes(served))
    for ready, expected in ((1, [1, 1, 1, 1, 1]), (4, [4, 1]), (8, [8])):
        while served.batcher.sizes[-1] < ready:
            await asyncio.sleep(0.001)
        ran.clear()
        with CompileLog() as log:
            reply = await app.post(INFER, inference(np.zeros((5, 28, 28), np.uint8)))
        assert (reply.status, len(probabilities(reply)), ran) == (200, 5, expected)
        assert log.compilations == 0
        go_on.release()
    await others
    assert compiled == [*SIZES]
    assert not any(name.startswith("model") for name in threads)
    for size in SIZES:
        series = [{"size": str(size), "cache": cache} for cache in ("hit", "miss")]
        counts = [app.metrics.registry.get_sample_value("gradtrail_compile_seconds_count", one) for one in series]
        assert sum(filter(None, counts)) == 1


async def test_later_size_with_a_fault_is_logged_and_not_used(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_size, run = ExportedModel.compile, ExportedModel.run

    def fail_for_four(model: ExportedModel, size: int) -> None:
        if size == 4:
            raise RuntimeError("no such instruction")
        compile_size(model, size)

    monkeypatch.setattr(ExportedModel, "compile", fail_for_four)
    monkeypatch.setattr(ExportedModel, "run", lambda model, batch: run(model, batch) * (1 - (len(batch) == 8)))
    app = application()
    served = await app.router.load(folders[0], all_sizes=False)
    app.router.swap(served)
    await app.router.add_remaining_sizes(served)
    assert served.batcher.sizes == (1,)
    compiler, answers = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert compiler == "batches of 4 are not used: no such instruction"
    assert answers.startswith("batches of 8 are not used: digits: its answers to 8 of 8 images are not probabilities")
    assert (await app.post(INFER, inference(np.zeros((5, 28, 28), np.uint8)))).status == 200
    with pytest.raises(RuntimeError):  # a model that replaces another one needs all sizes
        await app.router.load(folders[1])


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), dtype=np.uint8)


def batcher(model: FakeModel, **config: Any) -> Batcher:
    return Batcher(cast(ExportedModel, model), BatchingConfig(**config), ServerMetrics(), SIZES)


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


@given(st.lists(st.integers(0, 30), max_size=12), st.sampled_from([0.0, 2.0]))
def test_every_request_gets_the_answer_for_its_own_images(counts: list[int], max_wait_ms: float) -> None:
    model = FakeModel()

    async def main() -> list[np.ndarray]:
        queue = batcher(model, max_wait_ms=max_wait_ms)
        answers = await asyncio.gather(*(queue.predict(images(count, seed)) for seed, count in enumerate(counts)))
        queue.close()
        assert (queue.num_images, len(queue.queue)) == (0, 0)
        return answers

    for seed, (count, answer) in enumerate(zip(counts, asyncio.run(main()), strict=True)):
        np.testing.assert_array_equal(answer, shares(images(count, seed)).reshape(count, len(CLASSES)))
    assert {*model.batches} <= {*SIZES}
    assert sum(model.batches) >= sum(counts)


async def test_requests_during_a_batch_share_the_next_one() -> None:
    gate = Gate()
    model = FakeModel(gate)
    app = application(model)
    first = asyncio.create_task(app.post(INFER, inference(images(1))))
    await gate.is_entered()
    tasks = [asyncio.create_task(app.post(INFER, inference(images(1, seed)))) for seed in range(6)]
    while len(app.router.current.batcher.queue) < 6:
        await asyncio.sleep(0)
    assert app.metrics.registry.get_sample_value("gradtrail_queue_requests") == 6
    gate.opened.set()
    await asyncio.gather(first, *tasks)
    assert model.batches == [1, 8]
    assert app.metrics.registry.get_sample_value("gradtrail_batch_fill_ratio_sum", {"size": "8"}) == 6 / 8
    assert app.metrics.registry.get_sample_value("gradtrail_queue_wait_seconds_count") == 7


async def test_single_client_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = batcher(FakeModel(), max_wait_ms=1000)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda *_: pytest.fail("waits"))
    for seed in range(20):
        await queue.predict(images(1, seed))


async def test_only_a_lone_request_of_a_short_size_runs_in_the_event_loop() -> None:
    threads = list[threading.Thread]()

    def record_thread(batch: np.ndarray) -> np.ndarray:
        threads.append(threading.current_thread())
        return shares(batch)

    queue = batcher(FakeModel(record_thread))
    queue.short_sizes = {1}
    answer = await queue.predict(images(1))
    np.testing.assert_array_equal(answer, shares(images(1)))
    await queue.predict(images(3))
    queue.short_sizes = {8}
    await asyncio.gather(*(queue.predict(images(1, seed)) for seed in range(5)))
    assert [thread is threading.current_thread() for thread in threads] == [True, *[False] * (len(threads) - 1)]


async def test_concurrent_clients_share_batches() -> None:
    model = FakeModel()
    queue = batcher(model, max_wait_ms=50)
    for _ in range(4):
        model.batches.clear()
        await asyncio.gather(*(queue.predict(images(1, seed)) for seed in range(5)))
    assert max(model.batches) >= 4
    await queue.predict(images(1))  # it waits once, as the others are gone, and is answered


async def test_exception_of_the_model_reaches_only_requests_of_its_batch() -> None:
    def fail_on_zero(batch: np.ndarray) -> np.ndarray:
        if not batch[0].any():
            raise RuntimeError("broken")
        return shares(batch)

    queue = batcher(FakeModel(fail_on_zero))
    with pytest.raises(RuntimeError, match="broken"):
        await queue.predict(np.zeros((20, *SHAPE), np.uint8))  # in three parts
    np.testing.assert_array_equal(await queue.predict(images(3)), shares(images(3)))
    assert (queue.num_images, len(queue.queue)) == (0, 0)


async def test_queue_survives_a_thread_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model, start, app = FakeModel(), threading.Thread.start, application()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    app.router.swap(model.served_by(app.router))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        replies = await asyncio.gather(*(app.post(INFER, inference(images(8, seed))) for seed in range(250)))
    message = "the model's thread did not start: can't start new thread; try again"
    assert {(reply.status, reply.headers["retry-after"], reply.json["error"]) for reply in replies} == {
        (503, "1", message)
    }
    assert model.batches == []
    assert threading.Thread.start is start
    reply = await app.post(INFER, inference(images(3)))
    np.testing.assert_array_equal(probabilities(reply), shares(images(3)))
    assert model.batches == [4]


async def test_requests_that_wait_are_cancelled_refused_or_answered_and_the_thread_ends() -> None:
    gate, before = Gate(), {*threading.enumerate()}
    model = FakeModel(gate)
    queue = batcher(model, max_queue_images=10)
    first = asyncio.create_task(queue.predict(images(1)))
    await gate.is_entered()
    (thread,) = (new for new in {*threading.enumerate()} - before if new.name.startswith("model"))
    gone, *waiting = (asyncio.create_task(queue.predict(images(count))) for count in (3, 5, 2))
    await asyncio.sleep(0)
    with pytest.raises(HTTPException) as refused:
        await queue.predict(images(1))
    assert refused.value.status_code == 429
    gone.cancel()
    await asyncio.wait([gone])
    assert queue.num_images == 7
    queue.close()
    gate.opened.set()
    assert [len(answer) for answer in await asyncio.gather(first, *waiting)] == [1, 5, 2]
    assert model.batches == [1, 8]
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
