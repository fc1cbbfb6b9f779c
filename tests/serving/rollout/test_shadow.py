"""A shadow answers no client, is compared on every request, and is stopped for its answers, not for its queue."""

import asyncio
import threading
import time

import numpy as np
from trial_bench import Answers, bench, seven, sound


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
