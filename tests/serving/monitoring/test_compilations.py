"""Compilations that a request waits for are counted, and those before are not."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from gradtrail.serving.monitoring.compilations import watch_compilations


def test_compilations_of_threads_that_answer_are_told() -> None:
    told: list[float] = []
    images = np.ones(3, np.float32)
    end = watch_compilations(told.append, "model")
    try:
        ahead = jax.jit(lambda x: x * 2).lower(images).compile()
        assert told == []
        with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
            thread.submit(ahead, images).result()
            assert told == [], "a program that was compiled before"
            thread.submit(jax.jit(lambda x: x * 3), images).result()
            assert len(told) == 1
            assert told[0] > 0
    finally:
        end()
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        thread.submit(jax.jit(lambda x: x * 5), images).result()
    assert len(told) == 1
