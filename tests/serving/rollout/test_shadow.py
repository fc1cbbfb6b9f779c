"""A challenger that no client gets: it is compared on every request, and stopped for its answers, not for a queue."""

import asyncio
import threading
import time

import numpy as np
import pytest
from trial_bench import Answers, Bench, run, seven, sound


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


def test_shadow_that_answers_no_probabilities_is_stopped() -> None:
    async def scenario(made: Bench) -> None:
        made.trial.challenge(made.load(lambda batch: sound(batch) * 3 - 1, "2"))
        for number in range(20):
            assert (await made.ask(number)).by.version == "1"
            await made.settle()
        assert made.trial.about()["stopped"]["because"] == "errors"
        assert made.value("gradtrail_model_errors_total", role="primary", version="1") == 0

    run(scenario, share=0.0)


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


def test_a_shadow_that_hangs_under_load_is_stopped() -> None:
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

    run(scenario, share=0.0, patience_seconds=0.01)
