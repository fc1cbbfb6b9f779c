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
from gradtrail.serving.server.router import Answer, Images, Loaded, Served, Source, load
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


def test_twenty_swaps_under_load_lose_no_request_and_each_answer_is_of_one_model(folders: list[Path]) -> None:
    said_by = {"0": 3}
    num_answers = 0

    async def client(app: Application, seed: int, is_over: asyncio.Event) -> None:
        nonlocal num_answers
        rng = np.random.default_rng(seed)
        while not is_over.is_set():
            images = rng.integers(0, 256, (int(rng.integers(1, 20)), 28, 28), dtype=np.uint8)
            reply = await app.post("/v2/models/digits/infer", inference(images))
            assert reply.status == 200, reply.body
            version = reply.json["model_version"]
            assert reply.headers["gradtrail-model-version"] == version
            assert (probabilities(reply).argmax(axis=1) == said_by[version]).all()
            assert len(probabilities(reply)) == len(images)
            num_answers += 1

    async def main() -> None:
        app = await started(folders[0])
        models = [load(Source(folder=folder)) for folder in folders]
        is_over = asyncio.Event()
        clients = [asyncio.create_task(client(app, seed, is_over)) for seed in range(4)]
        for number in range(1, NUM_SWAPS + 1):
            said_by[str(number)] = (3, 7)[number % 2]
            app.router.swap(app.router.serve(replace(models[number % 2], version=str(number))))
            before = num_answers
            while num_answers < before + 5:
                assert not any(each.done() for each in clients), "a client gave up"
                await asyncio.sleep(0)
        is_over.set()
        await asyncio.gather(*clients)
        assert app.router.current.version == str(NUM_SWAPS)
        assert f'gradtrail_model_swaps_total{{role="primary"}} {NUM_SWAPS}' in app.metrics.text().decode()

    asyncio.run(main())


def test_no_request_compiles_whatever_its_number_of_images(folders: list[Path]) -> None:
    model = read_export(folders[0])

    async def main() -> None:
        app = await started(folders[0])
        with CompileLog() as log:
            for count in (*range(12), 17, 40):
                images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
                reply = await app.post("/v2/models/digits/infer", inference(images))
                found = probabilities(reply)
                assert found.shape == (count, 10)
            assert (log.compilations, log.unplanned) == (0, [])
        np.testing.assert_allclose(found, model.predict(images), rtol=1e-5)

    asyncio.run(main())


def test_a_model_says_what_each_size_took_and_whether_the_cache_had_it(folders: list[Path]) -> None:
    ticks = iter(range(100))
    loaded = load(Source(folder=folders[0]), clock=lambda: next(ticks))
    assert [(each.size, each.seconds) for each in loaded.sizes] == [(1, 1), (4, 1), (8, 1)]
    assert loaded.version == loaded.model.manifest.digest[:12]


@pytest.mark.parametrize("answers", ["NaN", "-1 to 2"])
def test_model_that_answers_no_probabilities_never_serves(answers: Literal["NaN", "-1 to 2"], tmp_path: Path) -> None:
    folder = write_wrong_export(tmp_path / "wrong", answers=answers)

    async def main() -> None:
        app = application()
        with pytest.raises(UserError, match="digits: its answers to 1 of 1 images are not probabilities, such as"):
            await app.router.load(Source(folder=folder))
        assert not app.router.is_ready

    asyncio.run(main())


def test_a_model_that_cannot_be_used_changes_nothing(folders: list[Path], tmp_path: Path) -> None:
    async def main() -> None:
        app = await started(folders[0])
        with pytest.raises(UserError):
            await app.router.load(Source(folder=tmp_path))
        assert app.router.current.version == "0"
        assert app.router.is_ready

    asyncio.run(main())


def test_a_rollout_decides_who_answers(folders: list[Path]) -> None:
    class Odd:
        """The challenger answers those whose id is odd."""

        def __init__(self, app: Application, challenger: Served) -> None:
            self.app, self.challenger = app, challenger

        async def answer(self, images: Images, request_id: str | None, current: Served) -> Answer:
            chosen = self.challenger if int(request_id or 0) % 2 else current
            return await self.app.router.answer_by(chosen, images)

    async def main() -> None:
        app = await started(folders[0])
        app.router.rollout = Odd(app, await app.router.load(Source(folder=folders[1], version="new")))
        image = np.zeros((1, 28, 28), np.uint8)
        for number in range(4):
            named = inference(image, id=str(number))
            for headers in ({}, {"X-Request-Id": str(number)}):
                reply = await app.post("/v2/models/digits/infer", named, headers)
                assert reply.json["model_version"] == ("new" if number % 2 else "0")
            reply = await app.post("/v2/models/digits/versions/0/infer", named)
            assert reply.json["model_version"] == "0"

    asyncio.run(main())


def test_models_that_are_loaded_have_been_run(folders: list[Path]) -> None:
    assert isinstance(load(Source(folder=folders[0])), Loaded)


def test_a_model_is_loaded_while_another_one_answers(folders: list[Path]) -> None:
    async def main() -> None:
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

    asyncio.run(main())
