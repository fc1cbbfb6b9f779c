"""The Prometheus metrics of a server, by its conventions: base units, `_total` for counters, few values per label.

Sources: https://prometheus.io/docs/practices/naming/ and https://prometheus.io/docs/practices/instrumentation/. No
label contains client input: unknown paths are one route, unknown types of errors one type, and the series of a model
version end when it is replaced.
"""

import threading
from collections.abc import Collection, Sequence
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

Role = Literal["primary", "challenger"]
Rollout = Literal["off", "shadow", "canary", "stopped"]
ROLES: tuple[Role, ...] = ("primary", "challenger")
STATES: tuple[Rollout, ...] = ("off", "shadow", "canary", "stopped")
OTHER = "other"
ERRORS = ("invalid", "unauthorized", "too_large", "not_found", "not_ready", "overloaded", "timeout", "failed")
SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
COMPILE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)


class ServerMetrics:
    """The metrics of one server, in their own registry; every method may be called from any thread."""

    def __init__(self, routes: Collection[str] = (), classes: Sequence[str] = ()) -> None:
        """Make the metrics, at zero.

        Args:
            routes: Templates of the paths that have their own label value, such as `/v2/models/{name}/infer`.
            classes: Display names of the classes, in the order of the labels.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call] # they would double the series; for the whole process
        self.registry = CollectorRegistry()
        self.classes = tuple(classes)
        self._routes = frozenset(routes)
        self._lock = threading.Lock()
        self._serving: dict[Role, tuple[str, ...]] = {}
        self._make_requests()
        self._make_models()
        self._make_rollout()
        ProcessCollector(registry=self.registry)

    def _make_requests(self) -> None:
        registry = self.registry
        self._request_seconds = Histogram(
            "gradtrail_request_seconds",
            "Seconds from a request's arrival to its answer; cold: the first answer of a model version.",
            ["route", "status", "temperature"],
            buckets=SECONDS,
            registry=registry,
        )
        self._errors = Counter("gradtrail_errors", "Failed requests.", ["kind"], registry=registry)
        for kind in (*ERRORS, OTHER):
            self._errors.labels(kind)
        self._ready = Gauge("gradtrail_ready", "1 while requests are answered, else 0.", registry=registry)
        self._ready_seconds = Gauge(
            "gradtrail_startup_seconds", "Seconds from the start of the process to ready.", registry=registry
        )
        self._queue = Gauge("gradtrail_queue_requests", "Requests waiting for a batch.", registry=registry)
        self._queue_seconds = Histogram(
            "gradtrail_queue_wait_seconds",
            "Seconds that a request waits for its batch.",
            buckets=SECONDS,
            registry=registry,
        )
        self._fill = Histogram(
            "gradtrail_batch_fill_ratio",
            "Number of images in a batch over its compiled size.",
            ["size"],
            buckets=SHARES,
            registry=registry,
        )
        self._compile_seconds = Histogram(
            "gradtrail_compile_seconds",
            "Seconds to compile or load a program for a batch size; cache: hit or miss of the compile cache.",
            ["size", "cache"],
            buckets=COMPILE_SECONDS,
            registry=registry,
        )
        self._late_compiles = Counter(
            "gradtrail_compiles_in_request", "Compilations during a request.", registry=registry
        )

    def _make_models(self) -> None:
        registry = self.registry
        model = ["role", "version"]
        self._info = Gauge(
            "gradtrail_model_info",
            "1 for each loaded model.",
            [*model, "name", "digest"],
            registry=registry,
        )
        self._model_seconds = Histogram(
            "gradtrail_model_seconds",
            "Seconds from a request's entry into a model's queue to the model's answer.",
            model,
            buckets=SECONDS,
            registry=registry,
        )
        self._model_errors = Counter(
            "gradtrail_model_errors", "Requests that a model failed to answer.", model, registry=registry
        )
        self._confidence = Histogram(
            "gradtrail_prediction_confidence_ratio",
            "Probability of the predicted class, per image.",
            model,
            buckets=SHARES,
            registry=registry,
        )
        self._predictions = Counter(
            "gradtrail_predictions", "Images by predicted class.", [*model, "class"], registry=registry
        )

    def _make_rollout(self) -> None:
        registry = self.registry
        self._compared = Counter(
            "gradtrail_compared_images", "Images that both models answered.", ["result"], registry=registry
        )
        for result in ("agreed", "disagreed"):
            self._compared.labels(result)
        self._state = Gauge(
            "gradtrail_rollout_state", "1 for the current state of the rollout.", ["state"], registry=registry
        )
        self._share = Gauge(
            "gradtrail_canary_share_ratio", "Share of clients that the challenger answers.", registry=registry
        )
        self._stops = Counter(
            "gradtrail_canary_stops", "Stopped challengers, by the test.", ["test"], registry=registry
        )
        self._dropped = Counter(
            "gradtrail_comparisons_dropped", "Comparisons skipped because the server was busy.", registry=registry
        )
        self._fallbacks = Counter(
            "gradtrail_canary_fallbacks",
            "Requests that the primary answered in place of the challenger.",
            registry=registry,
        )
        self._swaps = Counter("gradtrail_model_swaps", "Models replaced while serving.", ["role"], registry=registry)
        for role in ROLES:
            self._swaps.labels(role)
        self._registry_up = Gauge(
            "gradtrail_registry_up", "1 if the model registry responded the last time, else 0.", registry=registry
        )
        self._registry_up.set(1)
        self._follow_failures = Counter(
            "gradtrail_follow_failures", "New versions that could not be loaded.", ["role"], registry=registry
        )
        for role in ROLES:
            self._follow_failures.labels(role)
        self.rollout("off")

    def request(self, route: str, status: int, seconds: float, *, is_cold: bool = False) -> None:
        """Count one request by the template of its path; unknown ones are `other`."""
        label = route if route in self._routes else OTHER
        temperature = "cold" if is_cold else "warm"
        self._request_seconds.labels(label, str(status), temperature).observe(seconds)

    def error(self, kind: str) -> None:
        """Count a failed request by one of `ERRORS`."""
        self._errors.labels(kind if kind in ERRORS else OTHER).inc()

    def ready(self, is_ready: bool, *, seconds: float | None = None) -> None:
        """Set whether requests are answered; the first time with the seconds since the process started."""
        self._ready.set(is_ready)
        if seconds is not None:
            self._ready_seconds.set(seconds)

    def queue(self, length: int) -> None:
        """Set the number of waiting requests."""
        self._queue.set(length)

    def waited(self, seconds: float) -> None:
        """Count the waiting time of a request."""
        self._queue_seconds.observe(seconds)

    def batch(self, images: int, size: int) -> None:
        """Count a batch of `images` that was padded to `size`."""
        self._fill.labels(str(size)).observe(images / size)

    def compiled(self, size: int, seconds: float, *, from_cache: bool) -> None:
        """Count a program that was compiled or loaded from the compile cache before the model is ready."""
        self._compile_seconds.labels(str(size), "hit" if from_cache else "miss").observe(seconds)

    def compiled_in_request(self) -> None:
        """Count a compilation during a request."""
        self._late_compiles.inc()

    def serving(self, role: Role, name: str, version: str, digest: str) -> None:
        """Set the model that serves in a role; the series of the previous one end."""
        with self._lock:
            before = self._serving.get(role)
            if before == (name, version, digest):
                return
            self._forget(role)
            self._serving[role] = (name, version, digest)
            self._info.labels(role, version, name, digest).set(1)
            self._model_seconds.labels(role, version)
            self._model_errors.labels(role, version)
            self._confidence.labels(role, version)
            for name_of_class in self.classes:
                self._predictions.labels(role, version, name_of_class)
            if before is not None:
                self._swaps.labels(role).inc()

    def unloaded(self, role: Role) -> None:
        """Set that no model serves in a role."""
        with self._lock:
            self._forget(role)

    def _forget(self, role: Role) -> None:
        before = self._serving.pop(role, None)
        if before is None:
            return
        name, version, digest = before
        self._info.remove(role, version, name, digest)
        for metric in (self._model_seconds, self._model_errors, self._confidence):
            metric.remove(role, version)
        self._predictions.remove_by_labels({"role": role, "version": version})

    def answered(
        self, role: Role, version: str, seconds: float, labels: Sequence[int], confidences: Sequence[float]
    ) -> None:
        """Count the answer of a model to one request; late answers of a replaced version are ignored."""
        with self._lock:
            if self._is_gone(role, version):
                return
            self._model_seconds.labels(role, version).observe(seconds)
            confidence = self._confidence.labels(role, version)
            for value in confidences:
                confidence.observe(value)
            for label in labels:
                name = self.classes[label] if 0 <= label < len(self.classes) else OTHER
                self._predictions.labels(role, version, name).inc()

    def failed(self, role: Role, version: str) -> None:
        """Count a request that a model failed to answer."""
        with self._lock:
            if not self._is_gone(role, version):
                self._model_errors.labels(role, version).inc()

    def _is_gone(self, role: Role, version: str) -> bool:
        return role not in self._serving or self._serving[role][1] != version

    def compared(self, agreed: int, disagreed: int) -> None:
        """Count images that both models classified, with the same label or different ones."""
        self._compared.labels("agreed").inc(agreed)
        self._compared.labels("disagreed").inc(disagreed)

    def comparison_dropped(self) -> None:
        """Count a skipped comparison."""
        self._dropped.inc()

    def fell_back(self) -> None:
        """Count a request that the primary answered in place of the challenger."""
        self._fallbacks.inc()

    def rollout(self, state: Rollout, share: float = 0.0) -> None:
        """Set the state of the rollout, and the share of clients that the challenger answers."""
        for name in STATES:
            self._state.labels(name).set(name == state)
        self._share.set(share)

    def stopped(self, test: str) -> None:
        """Count a stopped challenger."""
        self._stops.labels(test).inc()
        self.rollout("stopped")

    def registry_up(self, is_up: bool) -> None:
        """Set whether the registry responds."""
        self._registry_up.set(is_up)

    def follow_failed(self, role: Role) -> None:
        """Count a new version that could not be loaded."""
        self._follow_failures.labels(role).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
