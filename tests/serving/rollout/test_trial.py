"""A challenger on trial before a real router, with models that are told what to answer."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.rollout.follow import Follower
from gradtrail.serving.rollout.split import in_canary
from gradtrail.serving.rollout.start import RolloutConfig, roll_out
from gradtrail.serving.rollout.trial import Trial, TrialConfig
from gradtrail.serving.server.batching import BatchingConfig
from gradtrail.serving.server.refusal import busy
from gradtrail.serving.server.router import Answer, Loaded, Router, Served, Source
from gradtrail.serving.server.watching import MetricsWatcher
from gradtrail.serving.slo import read_slo
from gradtrail.support.errors import UserError

CLASSES = tuple(map(str, range(10)))
SLO = Path(__file__).parents[3] / "slo.yaml"
Answers = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class About:
    """What the router reads of a manifest."""

    digest: str
    name: str = "digits"
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    image_shape: tuple[int, int] = (2, 2)
    classes: tuple[str, ...] = CLASSES


@dataclass
class Fake:
    """A model of which `run` is told."""

    manifest: Any
    run: Answers


def sound(batch: np.ndarray) -> np.ndarray:
    """The label is the first pixel."""
    return np.eye(10, dtype=np.float32)[batch[:, 0, 0] % 10]


def seven(batch: np.ndarray) -> np.ndarray:
    return np.eye(10, dtype=np.float32)[np.full(len(batch), 7)]


def throwing(batch: np.ndarray) -> np.ndarray:
    raise RuntimeError("the challenger's fault")


def not_a_number(batch: np.ndarray) -> np.ndarray:
    return np.full((len(batch), 10), np.nan, np.float32)


def slow(batch: np.ndarray) -> np.ndarray:
    time.sleep(0.05)
    return sound(batch)


@dataclass
class Bench:
    """A router with a primary, a trial, and their metrics."""

    router: Router
    trial: Trial
    metrics: ServerMetrics

    def load(self, run: Answers, version: str, **about: Any) -> Served:
        loaded = Loaded(model=Fake(About(f"digest {version}", **about), run), version=version, sizes=())  # type: ignore[arg-type]
        return self.router.serve(loaded)

    async def ask(self, number: int, client: str | None = None) -> Answer:
        images = np.full((1, 2, 2), number % 10, np.uint8)
        return await self.router.answer(images, client or f"client {number}", self.router.current)

    async def settle(self) -> None:
        """Wait for the comparisons."""
        while self.trial._tasks:
            await asyncio.gather(*self.trial._tasks)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@contextmanager
def bench(share: float) -> Iterator[Bench]:
    """Make a bench in a running event loop."""
    metrics = ServerMetrics((), CLASSES)
    router = Router(batching=BatchingConfig(max_wait_ms=0), watcher=MetricsWatcher(metrics))
    trial = Trial(TrialConfig(share=share, limits=read_slo(SLO).canary), router, metrics)
    made = Bench(router, trial, metrics)
    router.swap(made.load(sound, "1"))
    router.rollout = trial
    try:
        yield made
    finally:
        trial.challenge(None)
        router.close()


def run(scenario: Callable[[Bench], Any], share: float = 0.1) -> None:
    async def main() -> None:
        with bench(share) as made:
            await scenario(made)

    asyncio.run(main())


def test_the_share_of_clients_gets_the_challenger_and_a_client_stays() -> None:
    async def scenario(made: Bench) -> None:
        made.trial.challenge(made.load(sound, "2"))
        for _ in range(2):
            for number in range(300):
                answer = await made.ask(number)
                assert answer.by.version == ("2" if in_canary(f"client {number}", 0.1) else "1")
        await made.settle()
        assert made.trial.about()["state"] == "canary"
        assert made.value("gradtrail_compared_images_total", result="agreed") == made.trial.about()["requests"] > 30
        assert made.value("gradtrail_compared_images_total", result="disagreed") == 0
        assert made.value("gradtrail_canary_share_ratio") == 0.1

    run(scenario)


@pytest.mark.parametrize(
    ("challenger", "tests"),
    [
        (seven, {"agreement", "class share"}),
        (throwing, {"errors"}),
        (not_a_number, {"errors"}),
        pytest.param(slow, {"latency"}, marks=pytest.mark.slow),
    ],
)
def test_a_bad_challenger_is_stopped_and_no_client_notices_a_failure(
    challenger: Answers, tests: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(made: Bench) -> None:
        made.trial.challenge(made.load(challenger, "2"))
        by = []
        for number in range(1500):
            answer = await made.ask(number)
            by.append(answer.by.version)
            if challenger is not seven or answer.by.version == "1":
                assert answer.probabilities.argmax() == number % 10
            if made.trial.state == "stopped":
                break
        await made.settle()
        about = made.trial.about()
        assert about["state"] == "stopped"
        assert about["stopped"]["because"] in tests
        assert about["requests"] < 200
        assert by.count("2") <= about["requests"]
        assert (await made.ask(1)).by.version == "1"
        assert made.value("gradtrail_rollout_state", state="stopped") == 1
        assert made.value("gradtrail_canary_stops_total", test=about["stopped"]["because"]) == 1
        if tests == {"errors"}:
            assert by.count("2") == 0
            assert made.value("gradtrail_canary_fallbacks_total") == about["requests"]

    with caplog.at_level(logging.WARNING, "gradtrail.serve"):
        run(scenario)
    stops = [each.message for each in caplog.records if "is stopped" in each.message]
    assert len(stops) == 1
    assert stops[0].startswith("the challenger, version 2, is stopped: ")


def test_a_shadow_answers_nobody_and_is_compared_on_every_request() -> None:
    async def scenario(made: Bench) -> None:
        made.trial.challenge(made.load(seven, "2"))
        count = 0
        while made.trial.state == "shadow":
            assert (await made.ask(count)).by.version == "1"
            await made.settle()
            count += 1
        about = made.trial.about()
        assert about["requests"] == count < 200
        assert about["stopped"]["because"] in {"agreement", "class share"}
        assert made.value("gradtrail_canary_fallbacks_total") == 0

    run(scenario, share=0.0)


def test_a_challenger_that_hangs_costs_a_client_its_patience_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrail.serving.rollout.trial.PATIENCE_SECONDS", 0.02)

    def hanging(batch: np.ndarray) -> np.ndarray:
        time.sleep(0.2)
        return sound(batch)

    async def scenario(made: Bench) -> None:
        made.trial.challenge(made.load(hanging, "2"))
        for number in range(10):
            assert (await made.ask(number)).by.version == "1"
        assert made.trial.about()["stopped"]["because"] == "errors"

    run(scenario, share=1.0)


def test_a_promotion_of_the_challenger_ends_its_trial_and_another_one_begins_it_anew() -> None:
    async def scenario(made: Bench) -> None:
        made.trial.challenge(made.load(sound, "2"))
        for number in range(20):
            await made.ask(number)
        await made.settle()
        made.router.swap(made.load(sound, "3"))
        await made.ask(0)
        await made.settle()
        assert made.trial.about()["requests"] == 1, "the evidence was about another primary"
        made.router.swap(made.load(sound, "2"))
        assert (await made.ask(0)).by.version == "2"
        assert made.trial.about()["state"] == "off"
        assert made.value("gradtrail_rollout_state", state="off") == 1

    run(scenario, share=1.0)


def test_the_next_challenger_is_tried_after_one_was_stopped() -> None:
    async def scenario(made: Bench) -> None:
        made.trial.challenge(made.load(throwing, "2"))
        for number in range(10):
            await made.ask(number)
        assert made.trial.state == "stopped"
        made.trial.challenge(made.load(sound, "3"))
        assert (await made.ask(0)).by.version == "3"

    run(scenario, share=1.0)


def test_a_challenger_of_other_images_or_classes_is_refused() -> None:
    async def scenario(made: Bench) -> None:
        with pytest.raises(UserError, match="takes other images or classes"):
            made.trial.challenge(made.load(sound, "2", image_shape=(3, 3)))
        assert (await made.ask(0)).by.version == "1"

    run(scenario, share=1.0)


def test_a_request_that_found_a_model_before_it_was_replaced_is_answered() -> None:
    async def scenario(made: Bench) -> None:
        found = made.router.current
        made.router.swap(made.load(sound, "2"))
        answer = await made.router.answer(np.full((1, 2, 2), 3, np.uint8), None, found)
        assert answer.probabilities.argmax() == 3

    run(scenario, share=0.5)


@pytest.mark.parametrize("clients", [1, 4])
def test_a_shadow_within_its_limits_is_not_stopped_by_the_queue_of_comparisons(clients: int) -> None:
    def seconds(each: float) -> Answers:
        def answer(batch: np.ndarray) -> np.ndarray:
            time.sleep(each)
            return sound(batch)

        return answer

    async def scenario(made: Bench) -> None:
        made.router.swap(made.load(seconds(0.004), "1"))
        made.trial.challenge(made.load(seconds(0.006), "2"))

        async def client(first: int) -> None:
            for number in range(first, 200, clients):
                await made.ask(number)

        await asyncio.gather(*(client(first) for first in range(clients)))
        await made.settle()
        assert made.trial.state == "shadow", made.trial.about()
        assert made.trial.about()["requests"] > 10
        assert (made.value("gradtrail_comparisons_dropped_total") or 0) > 0

    run(scenario, share=0.0)


def test_a_shadow_that_hangs_under_load_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrail.serving.rollout.trial.PATIENCE_SECONDS", 0.01)
    is_over = threading.Event()

    def hanging(batch: np.ndarray) -> np.ndarray:
        assert is_over.wait(60)
        return sound(batch)

    async def scenario(made: Bench) -> None:
        made.trial.challenge(made.load(hanging, "2"))
        for number in range(20):
            await made.ask(number)
            await made.settle()
        is_over.set()
        assert made.trial.about()["stopped"]["because"] == "errors"

    run(scenario, share=0.0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_refusal_by_the_limits_of_the_server_is_no_error_of_the_challenger(share: float) -> None:
    async def scenario(made: Bench) -> None:
        challenger = made.load(sound, "2")
        made.trial.challenge(challenger)

        async def refuse(images: np.ndarray) -> np.ndarray:
            raise busy("too many")

        challenger.batcher.predict = refuse  # type: ignore[method-assign]
        for number in range(30):
            assert (await made.ask(number)).by.version == "1"
        await made.settle()
        assert (made.trial.state, made.trial.about()["requests"]) == ("canary" if share else "shadow", 0)
        assert made.value("gradtrail_model_errors_total", role="challenger", version="2") == 0

    run(scenario, share=share)


def test_the_first_exception_is_told_after_answers_and_timeouts_too(caplog: pytest.LogCaptureFixture) -> None:
    def at_times(batch: np.ndarray) -> np.ndarray:
        return throwing(batch) if batch[0, 0, 0] > 4 else sound(batch)

    async def scenario(made: Bench) -> None:
        made.trial.challenge(made.load(at_times, "2"))
        for number in range(8):
            await made.ask(number)
        await made.settle()

    with caplog.at_level(logging.WARNING, "gradtrail.serve"):
        run(scenario, share=1.0)
    (told,) = (each for each in caplog.records if each.exc_info)
    assert told.message == "the challenger, version 2, failed"


def test_another_challenger_counts_as_a_swap() -> None:
    async def scenario(made: Bench) -> None:
        for version in "234":
            made.trial.challenge(made.load(sound, version))
        assert made.value("gradtrail_model_swaps_total", role="challenger") == 2
        made.trial.challenge(None)
        assert made.value("gradtrail_model_info", role="challenger", version="4") is None

    run(scenario)


@pytest.mark.parametrize("other", [{"name": "letters"}, {"image_shape": (8, 8)}])
def test_a_champion_that_does_not_fit_is_not_taken(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    followers: list[Follower] = []

    async def hold(follower: Follower) -> None:
        followers.append(follower)

    monkeypatch.setattr(Follower, "run", hold)
    told: list[tuple[str, str]] = []
    monkeypatch.setattr("gradtrail.serving.rollout.start.remember", lambda *said: told.append(said))

    async def scenario(made: Bench) -> None:
        made.router.rollout = None
        versions = {"2": made.load(sound, "2", **other), "3": made.load(sound, "3")}

        async def load(source: Source) -> Served:
            return versions[source.version]

        monkeypatch.setattr(made.router, "load", load)
        config = RolloutConfig(follow_seconds=5)
        locate = lambda address: Source(folder=Path(), version=address.rpartition("/")[2])  # noqa: E731
        await roll_out("models:/digits@champion", config, made.router, made.metrics, locate)
        with pytest.raises(UserError, match="version 2: takes other images, or has other classes or another name"):
            await followers[0].take("2")
        assert (made.router.current.version, told) == ("1", [])
        await followers[0].take("3")
        assert made.router.current.version == "3"
        assert told == [("models:/digits@champion", "models:/digits/3")]

    run(scenario)


def test_a_challenger_that_is_no_alias_and_cannot_be_loaded_is_told_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def locate(address: str) -> Source:
        raise UserError(f"{address}: no exported model here")

    async def scenario(made: Bench) -> None:
        config = RolloutConfig(follow_seconds=0, challenger="nowhere", trial=made.trial.config)
        await roll_out("models:/digits@champion", config, made.router, made.metrics, locate)
        assert (await made.ask(1)).by.version == "1"
        assert made.value("gradtrail_follow_failures_total", role="challenger") == 1

    with caplog.at_level(logging.WARNING, "gradtrail.serve"):
        run(scenario)
    told = "challenger nowhere cannot be used, none is tried: nowhere: no exported model here"
    assert [(each.message, each.exc_info) for each in caplog.records] == [(told, None)]
