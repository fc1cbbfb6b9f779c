"""A challenger on trial: which clients get its answers, what stops it, and what ends its trial."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi import JSON, ask, inference
from starlette.exceptions import HTTPException

from gradtrail.serving.metrics import ServerMetrics
from gradtrail.serving.rollout.follow import Follower
from gradtrail.serving.rollout.split import is_in_canary
from gradtrail.serving.rollout.start import RolloutConfig, roll_out, rollout_config
from gradtrail.serving.rollout.trial import PATIENCE_SECONDS, Trial, TrialConfig
from gradtrail.serving.server.app import VERSION_HEADER, create_app
from gradtrail.serving.server.batching import BatchingConfig
from gradtrail.serving.server.middleware import DEADLINE, Limits
from gradtrail.serving.server.router import Answer, Served
from gradtrail.serving.slo import read_slo
from gradtrail.support.errors import UserError

CLASSES = tuple(map(str, range(10)))
SLO = Path(__file__).parents[3] / "deploy/slo.yaml"
Answers = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class About:
    """The part of a manifest that the router reads."""

    digest: str
    name: str = "digits"
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    image_shape: tuple[int, int] = (2, 2)
    classes: tuple[str, ...] = CLASSES


@dataclass
class Fake:
    """A model that is a function."""

    manifest: Any
    run: Answers


def sound(batch: np.ndarray) -> np.ndarray:
    """The label is the first pixel."""
    return np.eye(10, dtype=np.float32)[batch[:, 0, 0] % 10]


def seven(batch: np.ndarray) -> np.ndarray:
    return np.eye(10, dtype=np.float32)[np.full(len(batch), 7)]


def throwing(batch: np.ndarray) -> np.ndarray:
    raise RuntimeError("the challenger's fault")


@dataclass
class Bench:
    """A router with a primary and a trial."""

    trial: Trial

    def load(self, run: Answers, version: str, **about: Any) -> Served:
        return self.trial.serve(Fake(About(f"digest {version}", **about), run), version)  # type: ignore[arg-type]

    async def ask(self, number: int, client: str | None = None) -> Answer:
        images = np.full((1, 2, 2), number % 10, np.uint8)
        return await self.trial.answer(images, client or f"client {number}", self.trial.current)

    async def settle(self) -> None:
        """Wait for the comparisons."""
        while self.trial._tasks:
            await asyncio.gather(*self.trial._tasks)

    def value(self, name: str, **labels: str) -> float | None:
        return self.trial.metrics.registry.get_sample_value(name, labels)


@contextmanager
def bench(share: float = 0.1, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[Bench]:
    """Make a bench in a running event loop."""
    config = TrialConfig(share=share, thresholds=read_slo(SLO).canary, patience_seconds=patience_seconds)
    trial = Trial(batching=BatchingConfig(max_wait_ms=0), metrics=ServerMetrics(), config=config)
    made = Bench(trial)
    trial.swap(made.load(sound, "1"))
    try:
        yield made
    finally:
        trial.challenge(None)
        trial.close()


def beyond_one(batch: np.ndarray) -> np.ndarray:
    return sound(batch) * 3 - 1


async def test_share_of_clients_gets_the_challenger_and_each_client_keeps_its_model() -> None:
    with bench() as made:
        made.trial.challenge(made.load(sound, "2"))
        for _ in range(2):
            for number in range(300):
                answer = await made.ask(number)
                assert answer.model.version == ("2" if is_in_canary(f"client {number}", 0.1) else "1")
        await made.settle()
        assert made.trial.describe_rollout()["state"] == "canary"
        assert (
            made.value("gradtrail_compared_images_total", result="agreed")
            == made.trial.describe_rollout()["requests"]
            > 30
        )
        assert made.value("gradtrail_compared_images_total", result="disagreed") == 0
        assert made.value("gradtrail_canary_share_ratio") == 0.1


@pytest.mark.parametrize(
    ("challenger", "test"),
    [
        (seven, "agreement"),
        (throwing, "errors"),
        (beyond_one, "errors"),
    ],
)
async def test_bad_challenger_is_stopped_and_no_client_sees_a_failure(
    challenger: Answers, test: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gradtrail.serve"), bench() as made:
        made.trial.challenge(made.load(challenger, "2"))
        versions = []
        for number in range(1500):
            answer = await made.ask(number)
            versions.append(answer.model.version)
            if challenger is not seven or answer.model.version == "1":
                assert answer.probabilities.argmax() == number % 10
            if made.trial.state == "stopped":
                break
        await made.settle()
        about = made.trial.describe_rollout()
        assert about["state"] == "stopped"
        assert about["stopped"]["because"] == test
        assert about["requests"] < 200
        assert versions.count("2") <= about["requests"]
        assert (await made.ask(1)).model.version == "1"
        assert made.value("gradtrail_rollout_state", state="stopped") == 1
        assert made.value("gradtrail_canary_stops_total", test=test) == 1
        if test == "errors":
            assert versions.count("2") == 0
            assert made.value("gradtrail_canary_fallbacks_total") == about["requests"]
    stops = [record.message for record in caplog.records if "is stopped" in record.message]
    assert len(stops) == 1
    assert stops[0].startswith("the challenger, version 2, is stopped: ")


@pytest.mark.parametrize("seconds", [{"max_seconds": 0.4}, {"drain_seconds": 0.4}])
async def test_hanging_challenger_is_stopped_within_the_time_of_a_client(
    seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SLO.parents[1])
    options = {"challenger": "2", "canary": 1.0, "shadow": False, "follow_seconds": 0}
    config = rollout_config({"max_seconds": 30.0, "drain_seconds": 10.0, **options, **seconds}, Path()).trial
    assert config
    has_ended = threading.Event()

    def hanging(batch: np.ndarray) -> np.ndarray:
        assert has_ended.wait(60)
        return sound(batch)

    with bench(share=1.0, patience_seconds=config.patience_seconds) as made:
        app = create_app(made.trial, Limits(max_seconds=0.4))
        made.trial.challenge(made.load(hanging, "2"))
        for number in range(4):
            body = json.dumps({"inputs": [[number, 0], [0, 255]]}).encode()
            reply = await ask(app, "POST", "/invocations", [body], JSON)
            assert (reply.status, reply.headers[VERSION_HEADER.lower()]) == (200, "1")
        has_ended.set()
        assert made.trial.describe_rollout()["stopped"]["because"] == "errors"


async def test_request_with_little_time_left_is_answered_by_the_primary() -> None:
    with bench(share=1.0, patience_seconds=0.5) as made:
        made.trial.challenge(made.load(sound, "2"))
        for left, version in ((0.9, "1"), (1.1, "2")):
            DEADLINE.set(asyncio.get_running_loop().time() + left)
            assert (await made.ask(1)).model.version == version
        await made.settle()
        assert made.trial.describe_rollout()["requests"] == 1


async def test_promoted_challenger_ends_its_trial_and_another_primary_restarts_it() -> None:
    with bench(share=1.0) as made:
        made.trial.challenge(made.load(sound, "2"))
        for number in range(20):
            await made.ask(number)
        await made.settle()
        made.trial.swap(made.load(sound, "3"))
        await made.ask(0)
        await made.settle()
        assert made.trial.describe_rollout()["requests"] == 1, "the evidence was about another primary"
        made.trial.swap(made.load(sound, "2"))
        assert (await made.ask(0)).model.version == "2"
        assert made.trial.describe_rollout()["state"] == "off"
        assert made.value("gradtrail_rollout_state", state="off") == 1


async def test_status_and_log_state_that_each_process_decides_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    guarantee = (
        "if it satisfies both thresholds, this process stops it with a probability of at most 0.01, in this trial "
        "against this primary; other processes decide by themselves"
    )

    with caplog.at_level(logging.INFO, "gradtrail.serve"), bench() as made:
        made.trial.challenge(made.load(sound, "2"))
        about = made.trial.describe_rollout()
        assert about["guarantee"] == guarantee
        assert datetime.fromisoformat(about["since"]) <= datetime.now(UTC)
    assert [record.message for record in caplog.records] == [f"the challenger, version 2, is on trial; {guarantee}"]


@pytest.mark.parametrize("other", [{"image_shape": (3, 3)}, {"classes": ("a",) * 10}, {"name": "letters"}])
async def test_challenger_of_other_images_classes_or_name_is_refused(other: dict[str, Any]) -> None:
    with bench(share=1.0) as made:
        with pytest.raises(UserError, match="takes other images, or has other classes or another name, than digits"):
            made.trial.challenge(made.load(sound, "2", **other))
        assert (await made.ask(0)).model.version == "1"


async def test_header_or_id_of_a_request_selects_the_model_and_a_version_in_the_path_overrides_it() -> None:
    with bench(share=0.5) as made:
        app = create_app(made.trial)
        made.trial.challenge(made.load(sound, "2"))
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


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_refusal_by_limits_of_the_server_is_no_error_of_the_challenger(share: float) -> None:
    with bench(share=share) as made:
        challenger = made.load(sound, "2")
        made.trial.challenge(challenger)

        async def refuse(images: np.ndarray) -> np.ndarray:
            raise HTTPException(429, "too many")

        challenger.batcher.predict = refuse  # type: ignore[method-assign]
        for number in range(30):
            assert (await made.ask(number)).model.version == "1"
        await made.settle()
        assert (made.trial.state, made.trial.describe_rollout()["requests"]) == ("canary" if share else "shadow", 0)
        assert made.value("gradtrail_model_errors_total", role="challenger", version="2") == 0


async def test_first_exception_is_logged_even_after_answers(caplog: pytest.LogCaptureFixture) -> None:
    def at_times(batch: np.ndarray) -> np.ndarray:
        return throwing(batch) if batch[0, 0, 0] > 4 else sound(batch)

    with caplog.at_level(logging.WARNING, "gradtrail.serve"), bench(share=1.0) as made:
        made.trial.challenge(made.load(at_times, "2"))
        for number in range(8):
            await made.ask(number)
        await made.settle()
    (record,) = (record for record in caplog.records if record.exc_info)
    assert record.message == "the challenger, version 2, failed"


async def test_shadow_answers_no_client_and_is_compared_on_every_request() -> None:
    with bench(share=0.0) as made:
        made.trial.challenge(made.load(seven, "2"))
        count = 0
        while made.trial.state == "shadow":
            assert (await made.ask(count)).model.version == "1"
            await made.settle()
            count += 1
        about = made.trial.describe_rollout()
        assert about["requests"] == count < 200
        assert about["stopped"]["because"] == "agreement"
        assert made.value("gradtrail_canary_fallbacks_total") == 0


async def test_comparisons_are_skipped_under_load() -> None:
    def answer_after(seconds: float) -> Answers:
        def answer(batch: np.ndarray) -> np.ndarray:
            time.sleep(seconds)
            return sound(batch)

        return answer

    with bench(share=0.0) as made:
        made.trial.swap(made.load(answer_after(0.004), "1"))
        made.trial.challenge(made.load(answer_after(0.006), "2"))

        async def client(first: int) -> None:
            for number in range(first, 100, 4):
                await made.ask(number)

        await asyncio.gather(*(client(first) for first in range(4)))
        await made.settle()
        assert made.trial.state == "shadow", made.trial.describe_rollout()
        assert made.trial.describe_rollout()["requests"] > 10
        assert (made.value("gradtrail_comparisons_dropped_total") or 0) > 0


async def test_hanging_shadow_is_stopped() -> None:
    has_ended = threading.Event()

    def hanging(batch: np.ndarray) -> np.ndarray:
        assert has_ended.wait(60)
        return sound(batch)

    with bench(share=0.0, patience_seconds=0.01) as made:
        made.trial.challenge(made.load(hanging, "2"))
        for number in range(20):
            await made.ask(number)
            await made.settle()
        has_ended.set()
        assert made.trial.describe_rollout()["stopped"]["because"] == "errors"


@pytest.mark.parametrize("other", [{"name": "letters"}, {"image_shape": (8, 8)}])
async def test_champion_of_other_images_or_name_is_refused(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    followers: list[Follower] = []

    async def hold(follower: Follower) -> None:
        followers.append(follower)

    monkeypatch.setattr(Follower, "run", hold)
    remembered: list[tuple[str, str]] = []
    monkeypatch.setattr("gradtrail.serving.rollout.start.remember", lambda *uris: remembered.append(uris))

    with bench() as made:
        versions = {"2": made.load(sound, "2", **other), "3": made.load(sound, "3")}

        async def load(_: Path, version: str) -> Served:
            return versions[version]

        monkeypatch.setattr(made.trial, "load", load)
        config = RolloutConfig(follow_seconds=5)
        locate = lambda address: (Path(), address.rpartition("/")[2])  # noqa: E731
        await roll_out("models:/digits@champion", config, made.trial, locate)
        with pytest.raises(UserError, match="version 2: takes other images, or has other classes or another name"):
            await followers[0].load("2")
        assert (made.trial.current.version, remembered) == ("1", [])
        await followers[0].load("3")
        assert made.trial.current.version == "3"
        assert remembered == [("models:/digits@champion", "models:/digits/3")]


async def test_challenger_that_cannot_be_loaded_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def locate(address: str) -> tuple[Path, str]:
        raise UserError(f"{address}: no exported model here")

    with caplog.at_level(logging.WARNING, "gradtrail.serve"), bench() as made:
        config = RolloutConfig(follow_seconds=0, challenger="nowhere", trial=made.trial.config)
        await roll_out("models:/digits@champion", config, made.trial, locate)
        assert (await made.ask(1)).model.version == "1"
        assert made.value("gradtrail_follow_failures_total", role="challenger") == 1
    message = "challenger nowhere cannot be used, so there is no trial: nowhere: no exported model here"
    assert [(record.message, record.exc_info) for record in caplog.records] == [(message, None)]
