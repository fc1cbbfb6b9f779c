"""Models are replaced under load: no request is lost, none is answered by two models, and none compiles."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from asgi import Application, application, inference, probabilities, small_export
from exports import write_wrong_export

from gradtrail.core.xla.compile_events import CompileLog
from gradtrail.serving.server.router import Source, load
from gradtrail.stages.artifacts.exported import read_export
from gradtrail.support.errors import UserError

NUM_SWAPS = 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Exports that always answer 3, and always 7."""
    root = tmp_path_factory.mktemp("exports")
    return [small_export(root / str(label), always=label) for label in (3, 7)]


async def started(folder: Path) -> Application:
    app = application()
    app.router.swap(await app.router.load(Source(folder=folder, version="0")))
    return app


async def test_twenty_swaps_under_load_lose_no_request_and_every_answer_is_of_one_model(folders: list[Path]) -> None:
    labels = {"0": 3}
    num_answers = 0

    async def client(app: Application, seed: int, has_ended: asyncio.Event) -> None:
        nonlocal num_answers
        rng = np.random.default_rng(seed)
        while not has_ended.is_set():
            images = rng.integers(0, 256, (int(rng.integers(1, 20)), 28, 28), dtype=np.uint8)
            reply = await app.post("/v2/models/digits/infer", inference(images))
            assert reply.status == 200, reply.body
            version = reply.json["model_version"]
            assert reply.headers["gradtrail-model-version"] == version
            assert (probabilities(reply).argmax(axis=1) == labels[version]).all()
            assert len(probabilities(reply)) == len(images)
            num_answers += 1

    app = await started(folders[0])
    models = [load(Source(folder=folder)) for folder in folders]
    has_ended = asyncio.Event()
    clients = [asyncio.create_task(client(app, seed, has_ended)) for seed in range(4)]
    for number in range(1, NUM_SWAPS + 1):
        labels[str(number)] = (3, 7)[number % 2]
        app.router.swap(app.router.serve(replace(models[number % 2], version=str(number))))
        before = num_answers
        while num_answers < before + 5:
            assert not any(client.done() for client in clients), "a client gave up"
            await asyncio.sleep(0)
    has_ended.set()
    await asyncio.gather(*clients)
    assert app.router.current.version == str(NUM_SWAPS)
    assert f'gradtrail_model_swaps_total{{role="primary"}} {NUM_SWAPS}' in app.metrics.text().decode()


async def test_no_request_compiles(folders: list[Path]) -> None:
    model = read_export(folders[0])

    app = await started(folders[0])
    with CompileLog() as log:
        for count in (*range(12), 17, 40):
            images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
            reply = await app.post("/v2/models/digits/infer", inference(images))
            answered = probabilities(reply)
            assert answered.shape == (count, 10)
        assert (log.compilations, log.unplanned) == (0, [])
    np.testing.assert_allclose(answered, model.predict(images), rtol=1e-5)


def test_loaded_model_has_the_seconds_of_every_size(folders: list[Path]) -> None:
    ticks = iter(range(100))
    loaded = load(Source(folder=folders[0]), clock=lambda: next(ticks))
    assert [(size.size, size.seconds) for size in loaded.sizes] == [(1, 1), (4, 1), (8, 1)]
    assert loaded.version == loaded.model.manifest.digest[:12]


@pytest.mark.parametrize("answers", ["NaN", "-1 to 2"])
async def test_model_that_answers_no_probabilities_never_serves(
    answers: Literal["NaN", "-1 to 2"], tmp_path: Path
) -> None:
    folder = write_wrong_export(tmp_path / "wrong", answers=answers)

    app = application()
    with pytest.raises(UserError, match="digits: its answers to 1 of 1 images are not probabilities, such as"):
        await app.router.load(Source(folder=folder))
    assert not app.router.is_ready


async def test_unusable_model_changes_nothing(folders: list[Path], tmp_path: Path) -> None:
    app = await started(folders[0])
    with pytest.raises(UserError):
        await app.router.load(Source(folder=tmp_path))
    assert app.router.current.version == "0"
    assert app.router.is_ready


async def test_current_model_answers_while_another_one_is_loaded(folders: list[Path]) -> None:
    app = await started(folders[0])
    loading = asyncio.create_task(app.router.load(Source(folder=folders[1], version="1")))
    num_answers = 0
    while not loading.done():
        reply = await app.post("/v2/models/digits/infer", inference(np.zeros((1, 28, 28), np.uint8)))
        assert (reply.status, reply.json["model_version"]) == (200, "0")
        num_answers += 1
    assert num_answers
    app.router.swap(loading.result())
    reply = await app.post("/v2/models/digits/infer", inference(np.zeros((1, 28, 28), np.uint8)))
    assert reply.json["model_version"] == "1"
