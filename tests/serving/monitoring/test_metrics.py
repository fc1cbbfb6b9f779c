"""The Prometheus metrics of a server."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gradtrail.serving.monitoring.compilations import watch_compilations
from gradtrail.serving.monitoring.metrics import ERRORS, ServerMetrics

INFER = "/v2/models/{name}/infer"


def values(metrics: ServerMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, as a scraper reads it."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return values(metrics).get((name, frozenset(labels.items())))


def filled() -> ServerMetrics:
    """Metrics with a value in every series."""
    metrics = ServerMetrics([INFER], ["zero", "one"])
    metrics.ready(True, seconds=1.5)
    metrics.serving("primary", "digits", "1", "a" * 64)
    metrics.serving("challenger", "digits", "2", "b" * 64)
    metrics.compiled(8, 0.3, from_cache=False)
    metrics.compiled(8, 0.03, from_cache=True)
    metrics.request(INFER, 200, 0.004, is_cold=True)
    metrics.request(INFER, 200, 0.002)
    metrics.error("timeout")
    metrics.queue(3)
    metrics.waited(0.001)
    metrics.batch(6, 8)
    metrics.answered("primary", "1", 0.002, [0, 1, 1], [0.9, 0.8, 0.7])
    metrics.failed("challenger", "2")
    metrics.compared(9, 1)
    metrics.comparison_dropped()
    metrics.fell_back()
    metrics.stopped("errors")
    metrics.registry_up(False)
    metrics.follow_failed("challenger")
    return metrics


def test_client_input_makes_no_series() -> None:
    metrics = ServerMetrics([INFER], ["zero"])
    metrics.serving("primary", "digits", "1", "a")
    for number in range(100):
        metrics.request(f"/{number}", 404, 0.001)
        metrics.error(f"kind {number}")
        metrics.answered("primary", "1", 0.001, [number], [0.5])
    names = values(metrics)
    assert sum(name == "gradtrail_request_seconds_count" for name, _ in names) == 1
    assert sum(name == "gradtrail_errors_total" for name, _ in names) == len(ERRORS) + 1
    assert value(metrics, "gradtrail_predictions_total", role="primary", version="1", **{"class": "other"}) == 99


def test_hundred_promotions_leave_the_series_of_one_version() -> None:
    metrics = ServerMetrics([INFER], ["zero", "one"])
    metrics.serving("primary", "digits", "0", "digest")
    before = len(values(metrics))
    for number in range(1, 101):
        metrics.serving("primary", "digits", str(number), "digest")
        metrics.answered("primary", str(number), 0.001, [0], [0.5])
        metrics.answered("primary", str(number - 1), 0.001, [0], [0.5])
        metrics.failed("primary", str(number - 1))
    assert len(values(metrics)) == before
    assert value(metrics, "gradtrail_model_swaps_total", role="primary") == 100
    metrics.unloaded("primary")
    left = {name for name, labels in values(metrics) if ("role", "primary") in labels}
    assert left == {"gradtrail_model_swaps_total", "gradtrail_follow_failures_total"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus")
def test_promtool_accepts_the_names() -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=filled().text(), capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


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
