"""Following an alias, and a challenger on trial: whom it answers, what stops it, and what ends its trial."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import SHAPE, write_small_export
from in_memory_server import JSON, FakeModel, Gate, ask, inference, manifest
from starlette.exceptions import HTTPException

from gradtrail.serving import rollout
from gradtrail.serving.metrics import Role, ServerMetrics
from gradtrail.serving.registry import RegistryUnavailable
from gradtrail.serving.rollout import (
    Evidence,
    Follower,
    RolloutConfig,
    TrialRouter,
    is_in_canary,
    make_router,
    roll_out,
    rollout_config,
)
from gradtrail.serving.server.app import VERSION_HEADER, create_app
from gradtrail.serving.server.batching import BatchingConfig
from gradtrail.serving.server.middleware import DEADLINE, RequestLimits
from gradtrail.serving.server.router import Answer, Served
from gradtrail.serving.slo import read_slo
from gradtrail.support.errors import UserError

CLASSES = tuple(map(str, range(10)))
SLO = Path(__file__).parents[2] / "deploy/slo.yaml"
URI = "models:/digits@champion"
IMAGES = np.zeros((1, *SHAPE), np.uint8)
IDS = [f"client-{number}" for number in range(20_000)]
Answers = Callable[[np.ndarray], np.ndarray]


def test_ids_are_split_by_share_alike_in_every_process_and_a_larger_share_has_the_ids_of_a_smaller_one() -> None:
    ids = {share: {name for name in IDS if is_in_canary(name, share)} for share in (0.0, 0.01, 0.1, 0.5, 1.0)}
    for share, members in ids.items():
        assert abs(len(members) / len(IDS) - share) <= 4 * (share * (1 - share) / len(IDS)) ** 0.5
    assert ids[0.0] < ids[0.01] < ids[0.1] < ids[0.5] < ids[1.0]
    assert [name for name in IDS[:40] if name in ids[0.1]] == [f"client-{number}" for number in (0, 8, 17, 33)]
    assert is_in_canary("ä\udcff", 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"challenger": "@next", "canary": 0.1, "shadow": True}, "--canary and --shadow exclude each other"),
        ({"challenger": "@next"}, "a challenger needs --canary SHARE or --shadow"),
        ({"shadow": True}, "these need --challenger"),
        (
            {"precision": "bfloat16", "challenger": "2", "shadow": True},
            "--precision and --challenger exclude each other",
        ),
        ({"challenger": "@next", "shadow": True}, "--challenger @next: models/export is not in the registry; name"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any], message: str) -> None:
    others = {"challenger": None, "canary": None, "shadow": False, "precision": None, "follow_seconds": 5}
    with pytest.raises(UserError, match=message):
        rollout_config({**others, "max_seconds": 30, "drain_seconds": 10, **options}, "models/export", Path())


@dataclass
class Registry:
    """A registry with one alias; records the models in use."""

    version: str | None = "2"
    faults: dict[str, Exception] = field(default_factory=dict)  # raised for a URI
    used: list[str | None] = field(default_factory=list)
    metrics: ServerMetrics = field(default_factory=ServerMetrics)

    def answer(self, uri: str, answer: Any) -> Any:
        if uri in self.faults:
            raise self.faults[uri]
        return answer

    async def load(self, uri: str) -> Any:
        return self.answer(uri, uri)

    def follower(self, role: Role = "primary") -> Follower:
        uri, first = "models:/digits@champion", "models:/digits/1"
        use: Any = self.used.append
        return Follower(uri=uri, role=role, load=self.load, use=use, metrics=self.metrics, seconds=5, loaded=first)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    version_of = lambda name, alias: made.answer(f"models:/{name}@{alias}", made.version)  # noqa: E731
    monkeypatch.setattr(rollout, "version_of", version_of)
    monkeypatch.setattr(rollout, "remember", lambda *_: None)
    return made


def steps(follower: Follower, count: int) -> None:
    for _ in range(count):
        asyncio.run(follower.step())


def test_new_version_is_loaded_once_and_a_challenger_ends_with_its_alias(registry: Registry) -> None:
    follower = registry.follower("challenger")
    for version in ("1", "2", None):
        registry.version = version
        steps(follower, 2)
    assert registry.used == ["models:/digits/2", None]


@pytest.mark.parametrize("uri", ["models:/digits@champion", "models:/digits/2"])
@pytest.mark.parametrize("fault", [RegistryUnavailable("no response"), UserError("damaged"), KeyError("a bug")])
def test_problem_changes_nothing_and_is_logged_when_it_begins_and_ends(
    uri: str, fault: Exception, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.faults, follower = {uri: fault}, registry.follower()
    steps(follower, 3)
    assert registry.used == []
    value, is_down = registry.metrics.registry.get_sample_value, isinstance(fault, RegistryUnavailable)
    assert value("gradtrail_registry_up") == (0 if is_down else 1)
    assert value("gradtrail_follow_failures_total", {"role": "primary"}) == (0 if is_down else 3)
    registry.faults = {}
    steps(follower, 2)
    assert registry.used == ["models:/digits/2"]
    assert value("gradtrail_registry_up") == 1
    begin, end = caplog.records
    assert begin.message == f"{uri} cannot be loaded, the primary is still models:/digits/1: {fault}"
    assert (begin.exc_info is not None) == isinstance(fault, KeyError), "bugs have a traceback"
    assert end.message == "models:/digits@champion can be loaded again"


def test_version_that_cannot_be_loaded_is_tried_again_with_backoff(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.faults = {"models:/digits/2": UserError("the download is damaged")}
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 12:
            registry.faults = {}
        if len(waits) == 14:
            raise asyncio.CancelledError

    monkeypatch.setattr("gradtrail.serving.rollout.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(registry.follower().run())
    assert 8 <= waits[0] <= 12, "twice 5 s, spread by 20 %"
    assert 0.8 * rollout.MAX_BACKOFF_SECONDS <= max(waits) <= 1.2 * rollout.MAX_BACKOFF_SECONDS
    assert 4 <= waits[-1] <= 6


def sound(batch: np.ndarray) -> np.ndarray:
    """The label is the first pixel."""
    return np.eye(10, dtype=np.float32)[batch[:, 0, 0] % 10]


def seven(batch: np.ndarray) -> np.ndarray:
    return np.eye(10, dtype=np.float32)[np.full(len(batch), 7)]


def throwing(batch: np.ndarray) -> np.ndarray:
    raise RuntimeError("the challenger's fault")


def beyond_one(batch: np.ndarray) -> np.ndarray:
    return sound(batch) * 3 - 1


@dataclass
class Bench:
    """A router with a primary and a trial."""

    trial: TrialRouter

    def load(self, run: Answers, version: str, **about: Any) -> Served:
        about = {"image_shape": (2, 2), "classes": CLASSES, **about}
        return FakeModel(run, manifest(epochs=(int(version),), **about)).served_by(self.trial, version)

    async def ask(self, number: int) -> Answer:
        images = np.full((1, 2, 2), number % 10, np.uint8)
        return await self.trial.answer(images, f"client {number}", self.trial.current)

    async def settle(self) -> None:
        """Wait for the comparisons."""
        while self.trial._comparisons:
            await asyncio.gather(*self.trial._comparisons)

    def value(self, name: str, **labels: str) -> float | None:
        return self.trial.metrics.registry.get_sample_value(name, labels)


@contextmanager
def bench(
    share: float = 0.1, challenger: Answers | None = None, patience_seconds: float = rollout.PATIENCE_SECONDS
) -> Iterator[Bench]:
    """Make a bench in a running event loop, with the primary version 1, and version 2 on trial if there is a model."""
    config = RolloutConfig(follow_seconds=0, challenger="2", share=share, patience_seconds=patience_seconds)
    metrics, evidence = ServerMetrics(), Evidence(read_slo(SLO).canary)
    trial = TrialRouter(batching=BatchingConfig(max_wait_ms=0), metrics=metrics, config=config, evidence=evidence)
    made = Bench(trial)
    trial.swap(made.load(sound, "1"))
    if challenger:
        served = made.load(challenger, "2")
        served.batcher.short_sizes.add(1)  # as a challenger that hangs only once it is loaded
        trial.challenge(served)
    try:
        yield made
    finally:
        trial.challenge(None)
        trial.close()


async def test_share_of_clients_gets_the_challenger_and_each_client_keeps_its_model() -> None:
    with bench(challenger=sound) as made:
        for _ in range(2):
            for number in range(300):
                answer = await made.ask(number)
                assert answer.model.version == ("2" if is_in_canary(f"client {number}", 0.1) else "1")
        await made.settle()
        about = made.trial.describe_rollout()
        assert datetime.fromisoformat(about.pop("since")) <= datetime.now(UTC)
        count = made.value("gradtrail_compared_images_total", result="agreed")
        assert about == {"state": "canary", "challenger": "2", "share": 0.1, "requests": count, "stopped": None}
        assert about["requests"] > 30
        assert made.value("gradtrail_compared_images_total", result="disagreed") == 0
        assert made.value("gradtrail_model_seconds_count", role="challenger", version="2") == count
        assert made.value("gradtrail_canary_share_ratio") == 0.1


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize(("challenger", "test"), [(seven, "agreement"), (throwing, "errors"), (beyond_one, "errors")])
async def test_bad_challenger_is_stopped_and_no_client_sees_a_failure(
    share: float, challenger: Answers, test: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gradtrail.serve"), bench(share, challenger) as made:
        versions = []
        for number in range(1500):
            answer = await made.ask(number)
            versions.append(answer.model.version)
            if answer.model.version == "1":
                assert answer.probabilities.argmax() == number % 10
            await made.settle()
            if made.trial.state == "stopped":
                break
        about = made.trial.describe_rollout()
        assert about["state"] == "stopped"
        assert about["stopped"]["because"] == test
        assert about["requests"] < 200
        assert (await made.ask(1)).model.version == "1"
        assert made.value("gradtrail_rollout_state", state="stopped") == 1
        assert made.value("gradtrail_canary_stops_total", test=test) == 1
        is_answering = bool(share) and test == "agreement"
        assert versions.count("2") == (about["requests"] if is_answering else 0)
        num_fallbacks = about["requests"] if share and test == "errors" else 0
        assert made.value("gradtrail_canary_fallbacks_total") == num_fallbacks
    stops = [record.message for record in caplog.records if "is stopped" in record.message]
    assert stops == [f"the challenger, version 2, is stopped: {about['stopped']['message']}"]
    tracebacks = [record.message for record in caplog.records if record.exc_info]
    assert tracebacks == ["the challenger, version 2, failed"] * (test == "errors")


@pytest.mark.parametrize("seconds", [{"max_seconds": 0.4}, {"drain_seconds": 0.4}])
async def test_hanging_challenger_is_stopped_within_the_time_of_a_client(seconds: dict[str, float]) -> None:
    options = {"challenger": "2", "canary": 1.0, "shadow": False, "precision": None, "follow_seconds": 0}
    config = rollout_config({"max_seconds": 30.0, "drain_seconds": 10.0, **options, **seconds}, "", Path())
    hanging = Gate(sound)
    with bench(1.0, hanging, config.patience_seconds) as made:
        app = create_app(made.trial, RequestLimits(max_seconds=0.4))
        for number in range(4):
            body = json.dumps({"inputs": [[number, 0], [0, 255]]}).encode()
            reply = await ask(app, "POST", "/invocations", [body], JSON)
            assert (reply.status, reply.headers[VERSION_HEADER.lower()]) == (200, "1")
        hanging.opened.set()
        assert made.trial.describe_rollout()["stopped"]["because"] == "errors"


async def test_hanging_shadow_is_stopped_but_not_by_requests_of_an_earlier_trial() -> None:
    hanging = Gate(sound)
    with bench(0.0, hanging, patience_seconds=0.02) as made:
        for number in range(rollout.MAX_COMPARISONS):
            await made.ask(number)
        made.trial.swap(made.load(sound, "3"))
        await made.settle()
        assert (made.trial.state, made.trial.describe_rollout()["requests"]) == ("shadow", 0)
        assert made.value("gradtrail_rollout_state", state="stopped") == 0
        for number in range(20):
            await made.ask(number)
            await made.settle()
        hanging.opened.set()
        assert made.trial.describe_rollout()["stopped"]["because"] == "errors"


async def refuse(_: np.ndarray) -> np.ndarray:
    raise HTTPException(429, "too many")


async def wait_for_others(_: np.ndarray) -> np.ndarray:
    """Wait in the queue, behind short batches."""
    await asyncio.sleep(60)
    raise AssertionError


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("predict", [refuse, wait_for_others])
async def test_busy_server_and_empty_requests_are_no_evidence(share: float, predict: Any) -> None:
    with bench(share, sound, patience_seconds=0.02) as made:
        await made.trial.answer(np.zeros((0, 2, 2), np.uint8), "empty", made.trial.current)
        challenger = made.trial.evidence.challenger
        assert challenger is not None
        challenger.batcher.predict = predict  # type: ignore[method-assign]
        for number in range(10):
            assert (await made.ask(number)).model.version == "1"
            await made.settle()
        assert (made.trial.state, made.trial.describe_rollout()["requests"]) == ("canary" if share else "shadow", 0)
        assert made.value("gradtrail_comparisons_dropped_total") == 10
        assert made.value("gradtrail_model_errors_total", role="challenger", version="2") == 0


async def test_failures_of_the_primary_are_no_evidence() -> None:
    with bench(1.0, sound) as made:
        made.trial.current.batcher.predict = refuse  # type: ignore[method-assign]
        for number in range(100):
            assert (await made.ask(number)).model.version == "2"
            await made.settle()
        assert (made.trial.state, made.trial.describe_rollout()["requests"]) == ("canary", 100)


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_comparisons_are_skipped_under_load(share: float) -> None:
    hanging = Gate(sound)
    with bench(share, sound if share else hanging) as made:
        if share:  # the primary's answers are waited for
            made.trial.current.batcher.predict = lambda images: asyncio.to_thread(hanging, images)  # type: ignore[method-assign]
        for number in range(20):
            assert (await made.ask(number)).model.version == ("2" if share else "1")
        assert made.value("gradtrail_comparisons_dropped_total") == 20 - rollout.MAX_COMPARISONS
        hanging.opened.set()
        await made.settle()
        requests = 20 if share else rollout.MAX_COMPARISONS
        assert made.trial.describe_rollout()["requests"] == requests
        assert made.value("gradtrail_compared_images_total", result="agreed") == rollout.MAX_COMPARISONS


async def test_request_with_little_time_left_is_answered_by_the_primary() -> None:
    with bench(1.0, sound, patience_seconds=0.5) as made:
        for left, version in ((0.9, "1"), (1.1, "2")):
            DEADLINE.set(asyncio.get_running_loop().time() + left)
            assert (await made.ask(1)).model.version == version
        await made.settle()
        assert made.trial.describe_rollout()["requests"] == 1


async def test_another_primary_restarts_the_trial_and_a_promoted_challenger_ends_it() -> None:
    with bench(1.0, sound) as made:
        first = made.trial.current
        for number in range(20):
            await made.ask(number)
        made.trial.swap(made.load(sound, "3"))
        await made.settle()
        answer = await made.trial.answer(np.zeros((1, 2, 2), np.uint8), "client", first)
        assert answer.model.version == "1", "a request ends with the primary that it began with"
        await made.ask(0)
        await made.settle()
        assert made.trial.describe_rollout()["requests"] == 1, "the evidence was about another primary"
        made.trial.swap(made.load(sound, "2"))
        assert (await made.ask(0)).model.version == "2"
        assert made.trial.describe_rollout()["state"] == "off"
        assert made.value("gradtrail_rollout_state", state="off") == 1


async def test_header_or_id_of_a_request_selects_the_model_and_a_version_in_the_path_overrides_it() -> None:
    with bench(0.5, sound) as made:
        app = create_app(made.trial)
        path = "/v2/models/digits"
        for number in range(8):
            name = f"client {number}"
            expected = "2" if is_in_canary(name, 0.5) else "1"
            for content, headers in (({"id": name}, JSON), ({}, {**JSON, "x-request-id": name})):
                sent = json.dumps(inference(np.zeros((1, 2, 2), np.uint8), **content)).encode()
                reply = await ask(app, "POST", f"{path}/infer", [sent], headers)
                assert reply.json["model_version"] == expected
            reply = await ask(app, "POST", f"{path}/versions/1/infer", [sent], headers)
            assert reply.json["model_version"] == "1"
        await made.settle()


async def test_challenger_in_another_precision_is_compared_with_its_own_version_only(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {
        str(number): write_small_export(tmp_path / str(number), seed=number, precisions=("bfloat16",))
        for number in (1, 2)
    }
    options = {"challenger": None, "canary": None, "shadow": True, "precision": "bfloat16", "follow_seconds": 5}
    config = rollout_config({**options, "max_seconds": 30, "drain_seconds": 10}, URI, Path())
    trial = make_router(config, BatchingConfig(max_wait_ms=0), ServerMetrics())
    assert isinstance(trial, TrialRouter)
    trial.swap(await trial.load(folders["1"], "1"))
    events, followers = [], list[Follower]()

    async def follow(follower: Follower) -> None:
        followers.append(follower)

    monkeypatch.setattr(Follower, "run", follow)
    await roll_out(URI, config, trial, lambda uri: (folders[uri[-1]], uri[-1]))
    for follower in followers:
        for registry.version in ("1", "2"):
            await follower.step()
            before = trial.evidence.requests
            await trial.answer(IMAGES, "client", trial.current)
            while trial._comparisons:
                await asyncio.gather(*trial._comparisons)
            events.append((trial.current.version, trial.evidence.version, trial.evidence.requests - before))
    assert events == [
        ("1", None, 0),
        ("2", None, 0),
        ("2", "1-bfloat16", 0),
        ("2", "2-bfloat16", 1),
    ]
    trial.challenge(await trial.load(folders["1"], "1", precision="bfloat16"))
    trial.swap(await trial.load(folders["1"], "1"))
    assert trial.state == "shadow", "the challenger may be loaded first"
    trial.challenge(None)
    trial.close()


async def test_precision_without_a_trial_is_that_of_the_primary(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follower, "run", Follower.step)
    folder = write_small_export(tmp_path / "export", precisions=("bfloat16",))
    options = {"challenger": None, "canary": None, "shadow": False, "precision": "bfloat16", "follow_seconds": 5}
    config = rollout_config({**options, "max_seconds": 30, "drain_seconds": 10}, URI, Path())
    router = make_router(config, BatchingConfig(max_wait_ms=0), ServerMetrics())
    router.swap(first := await router.load(folder, "2", precision=config.primary_precision))
    await roll_out(URI, config, router, lambda _: (folder, "2"))
    assert (router.current is first, first.version) == (True, "2-bfloat16"), "the alias has not moved"
    registry.version = "3"
    await roll_out(URI, config, router, lambda _: (folder, "3"))
    assert router.current.version == "3-bfloat16"
    router.close()


@pytest.mark.parametrize("other", [{"image_shape": (3, 3)}, {"classes": ("a",) * 10}, {"name": "letters"}])
async def test_models_that_cannot_replace_the_primary_or_be_compared_with_it_are_refused(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, remembered = iter(["2", None, "3"]), list[tuple[str, str]]()
    monkeypatch.setattr(rollout, "version_of", lambda *_: next(answers))
    monkeypatch.setattr(rollout, "remember", lambda *uris: remembered.append(uris))

    async def three_steps(follower: Follower) -> None:
        for _ in range(3):
            await follower.step()

    monkeypatch.setattr(Follower, "run", three_steps)
    with bench(1.0) as made:
        versions = {"models:/digits/2": made.load(sound, "2", **other), "models:/digits/3": made.load(sound, "3")}
        versions["folder"] = made.load(sound, "4", **other)

        async def load(_: Path, uri: str, precision: str) -> Served:
            assert not precision
            return versions[uri]

        monkeypatch.setattr(made.trial, "load", load)
        config = RolloutConfig(follow_seconds=5, challenger="folder")
        locate = lambda uri: (Path(), uri)  # noqa: E731
        await roll_out("models:/digits@champion", config, made.trial, locate)
        assert (made.trial.current.version, made.trial.state) == ("3", "off")
        assert remembered == [("models:/digits@champion", "models:/digits/3")]
    difference = "takes other images, or has other classes or another name, than the model that serves"
    primary = "cannot be loaded, the primary is still models:/digits/1"
    assert sorted(record.message for record in caplog.records) == [
        f"folder cannot be loaded, the challenger is still none: version 4 {difference}",
        f"models:/digits/2 {primary}: version 2 {difference}; restart the server to serve it",
        "models:/digits@champion can be loaded again",
        f"models:/digits@champion {primary}: the registry has no such alias",
    ]
