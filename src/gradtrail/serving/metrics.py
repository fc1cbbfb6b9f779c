"""The Prometheus metrics of a server, by its conventions: base units, `_total` for counters, few values per label.

Sources: https://prometheus.io/docs/practices/naming/ and https://prometheus.io/docs/practices/instrumentation/. No
label contains client input, and the series of a model version end when it is replaced.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gradtrail.support.accelerator import gpu_use
from gradtrail.support.errors import UserError
from gradtrail.support.running_time import seconds_running

Role = Literal["primary", "challenger"]
Rollout = Literal["off", "shadow", "canary", "stopped"]
Temperature = Literal["warm", "cold"]  # cold: the first answer of a model version
ROLES: tuple[Role, ...] = ("primary", "challenger")
STATES: tuple[Rollout, ...] = ("off", "shadow", "canary", "stopped")
OUTCOMES = ("answered", "slow", "failed", "refused")  # refused: a mistake of the client
# Answers take at most so long, by the objectives of deploy/prometheus/rules.yaml
SLOW_SECONDS: dict[Temperature, float] = {"warm": 0.05, "cold": 0.25}
SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
COMPILE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)


class ServerMetrics:
    """The metrics of one server, in their own registry, each an attribute with the metric's name.

    Args:
        price_per_hour: Price of an hour of the machine; None for no metrics of the cost.
    """

    def __init__(self, price_per_hour: float | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # they would double the series; for the whole process
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=SECONDS)
        shares = partial(Histogram, registry=registry, buckets=SHARES)

        self.request_seconds = seconds(
            "gradtrail_request_seconds",
            "Seconds from a request's arrival to its answer; cold: the first answer of a model version.",
            ["route", "status", "temperature"],
        )
        self.requests = counter(
            "gradtrail_requests",
            "Requests to classify; slow: answered after more than "
            f"{1000 * SLOW_SECONDS['warm']:g} ms, or {1000 * SLOW_SECONDS['cold']:g} ms if cold.",
            ["outcome", "temperature"],
        )
        self.ready = gauge("gradtrail_ready", "1 while requests are answered, else 0.")
        self.startup_seconds = gauge("gradtrail_startup_seconds", "Seconds from the start of the process to ready.")
        self.queue_requests = gauge("gradtrail_queue_requests", "Requests waiting for a batch.")
        self.queue_wait_seconds = seconds("gradtrail_queue_wait_seconds", "Seconds that a request waits for its batch.")
        self.batch_fill = shares(
            "gradtrail_batch_fill_ratio", "Number of images in a batch over its compiled size.", ["size"]
        )
        self.compile_seconds = seconds(
            "gradtrail_compile_seconds",
            "Seconds to compile or load a program for a batch size; cache: hit or miss of the compile cache.",
            ["size", "cache"],
            buckets=COMPILE_SECONDS,
        )
        self.compiles_in_request = counter("gradtrail_compiles_in_request", "Compilations during a request.")

        version = ["role", "version"]
        self.model_info = gauge("gradtrail_model_info", "1 for each loaded model.", [*version, "name", "digest"])
        self.model_seconds = seconds(
            "gradtrail_model_seconds",
            "Seconds from a request's entry into a model's queue to the model's answer.",
            version,
        )
        self.model_errors = counter("gradtrail_model_errors", "Requests that a model failed to answer.", version)
        self.refused_answers = counter(
            "gradtrail_refused_answers", "Requests whose answers were no probabilities, such as NaN.", version
        )
        self.prediction_confidence = shares(
            "gradtrail_prediction_confidence_ratio", "Probability of the predicted class, per image.", version
        )
        self._of_versions = (self.model_seconds, self.model_errors, self.refused_answers, self.prediction_confidence)
        self.predictions = counter("gradtrail_predictions", "Images by predicted class.", [*version, "class"])
        self.model_swaps = counter("gradtrail_model_swaps", "Models replaced while serving.", ["role"])
        self.registry_up = gauge("gradtrail_registry_up", "1 if the model registry responded the last time, else 0.")
        self.follow_failures = counter("gradtrail_follow_failures", "New versions that could not be loaded.", ["role"])

        self.compared_images = counter("gradtrail_compared_images", "Images that both models answered.", ["result"])
        self.rollout_state = gauge("gradtrail_rollout_state", "1 for the current state of the rollout.", ["state"])
        self.canary_share = gauge("gradtrail_canary_share_ratio", "Share of clients that the challenger answers.")
        self.canary_stops = counter("gradtrail_canary_stops", "Stopped challengers, by the test.", ["test"])
        self.comparisons_dropped = counter(
            "gradtrail_comparisons_dropped", "Comparisons skipped because the server was busy."
        )
        self.canary_fallbacks = counter(
            "gradtrail_canary_fallbacks", "Requests that the primary answered in place of the challenger."
        )

        registry.register(_AcceleratorCollector(is_used=lambda: bool(self._serving)))
        if price_per_hour is not None:
            gauge("gradtrail_price_per_hour", "Price of an hour of the machine.").set(price_per_hour)
            cost = gauge(
                "gradtrail_cost_per_thousand_answers",
                "1000 * price * hours since the start of the process / answered requests; NaN before the first.",
            )
            price = price_per_hour / 3600
            cost.set_function(lambda: 1000 * price * seconds_running() / (self._num_answers or math.nan))

        # Series with known labels begin at zero, so that the first increase is seen as one.
        for metric, values in (
            (self.compared_images, ("agreed", "disagreed")),
            (self.model_swaps, ROLES),
            (self.follow_failures, ROLES),
        ):
            for value in values:
                metric.labels(value)
        for outcome in OUTCOMES:
            for temperature in SLOW_SECONDS:
                self.requests.labels(outcome, temperature)
        self.registry_up.set(1)
        self.rollout("off")
        self.classes: Sequence[str] = ()  # names of the classes, in the order of the labels
        self._serving: dict[Role, tuple[str, str, str]] = {}
        self._num_answers = 0  # answered requests to classify

    def count_request(self, status: int, seconds: float, temperature: Temperature) -> None:
        """Count a request to classify by its outcome; an overloaded server fails it."""
        if status >= 500 or status == 429:
            outcome = "failed"
        elif status >= 400:
            outcome = "refused"
        else:
            outcome = "slow" if seconds > SLOW_SECONDS[temperature] else "answered"
        self.requests.labels(outcome, temperature).inc()
        self._num_answers += status < 400

    def serving(self, role: Role, name: str, version: str, digest: str) -> None:
        """Set the model that serves in a role; the series of the previous one end."""
        before = self._serving.get(role)
        if before == (name, version, digest):
            return
        self.unloaded(role)
        self._serving[role] = (name, version, digest)
        self.model_info.labels(role, version, name, digest).set(1)
        for metric in self._of_versions:
            metric.labels(role, version)
        for name_of_class in self.classes:
            self.predictions.labels(role, version, name_of_class)
        if before is not None:
            self.model_swaps.labels(role).inc()

    def unloaded(self, role: Role) -> None:
        """End the series of the model that serves in a role."""
        if role not in self._serving:
            return
        name, version, digest = self._serving.pop(role)
        self.model_info.remove(role, version, name, digest)
        for metric in self._of_versions:
            metric.remove(role, version)
        self.predictions.remove_by_labels({"role": role, "version": version})

    def answered(
        self, role: Role, version: str, seconds: float, labels: Sequence[int], confidences: Sequence[float]
    ) -> None:
        """Count the answer of a model to one request; late answers of a replaced version are ignored."""
        if not self._serves(role, version):
            return
        self.model_seconds.labels(role, version).observe(seconds)
        confidence = self.prediction_confidence.labels(role, version)
        for label, value in zip(labels, confidences, strict=True):
            confidence.observe(value)
            self.predictions.labels(role, version, self.classes[label]).inc()

    def failed(self, role: Role, version: str, error: Exception) -> None:
        """Count a request that a model failed to answer; UserError: its answer was no probabilities."""
        if self._serves(role, version):
            self.model_errors.labels(role, version).inc()
            self.refused_answers.labels(role, version).inc(isinstance(error, UserError))

    def _serves(self, role: Role, version: str) -> bool:
        return role in self._serving and self._serving[role][1] == version

    def rollout(self, state: Rollout, share: float = 0.0) -> None:
        """Set the state of the rollout, and the share of clients that the challenger answers."""
        for name in STATES:
            self.rollout_state.labels(name).set(name == state)
        self.canary_share.set(share)


class _AcceleratorCollector(Collector):
    """Memory and utilization of the accelerator that answers; no series on a CPU, and none before a model is loaded."""

    def __init__(self, is_used: Callable[[], bool]) -> None:
        self._is_used = is_used

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield what JAX and NVML know at the moment."""
        import jax

        if not self._is_used():  # else JAX would look for devices before it is set up
            return
        memory = jax.local_devices()[0].memory_stats() or {}
        for key, name, text in (
            ("bytes_in_use", "memory_bytes", "Accelerator memory that JAX uses in this process."),
            ("bytes_limit", "memory_limit_bytes", "Accelerator memory that JAX may use in this process."),
        ):
            if key in memory:
                yield GaugeMetricFamily(f"gradtrail_accelerator_{name}", text, memory[key])
        if memory and (gpu := gpu_use()):
            text = "Share of the last moments in which the GPU computed, for any process."
            yield GaugeMetricFamily("gradtrail_accelerator_utilization_ratio", text, gpu.utilization)


def count_compilations(metrics: ServerMetrics, *threads: str) -> Callable[[], None]:
    """Count compilations in threads whose names begin so, and log why; return a function that ends this.

    JAX reports a compilation in the thread that causes it. Models are compiled in threads of other names.
    """
    from gradtrail.core.xla.compile_log import Compilation, CompileLog

    def count(compilation: Compilation) -> None:
        if threading.current_thread().name.startswith(threads):
            metrics.compiles_in_request.inc()
            logging.getLogger("gradtrail.serve").warning("during a request %s", compilation)

    return CompileLog(count).__enter__().__exit__
