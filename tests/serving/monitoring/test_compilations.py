"""Compilations during a request are reported, earlier ones are not."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from gradtrail.serving.monitoring.compilations import watch_compilations


def test_compilations_in_answering_threads_are_reported() -> None:
    reported: list[float] = []
    images = np.ones(3, np.float32)
    end = watch_compilations(reported.append, "model")
    try:
        ahead = jax.jit(lambda x: x * 2).lower(images).compile()
        assert reported == []
        with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
            thread.submit(ahead, images).result()
            assert reported == [], "the program was compiled before"
            thread.submit(jax.jit(lambda x: x * 3), images).result()
            assert len(reported) == 1
            assert reported[0] > 0
    finally:
        end()
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        thread.submit(jax.jit(lambda x: x * 5), images).result()
    assert len(reported) == 1
