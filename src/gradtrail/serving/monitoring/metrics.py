"""What a server tells Prometheus, named by its conventions: base units, `_total` for counters, few values a label.

Sources: https://prometheus.io/docs/practices/naming/ and https://prometheus.io/docs/practices/instrumentation/. No
label holds what a client sends: unknown paths are one route, unknown kinds of errors one kind, and the series of a
model version end when it is replaced.
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
KINDS = (
    "invalid",
    "unauthorized",
    "too_large",
    "not_found",
    "not_ready",
    "overloaded",
    "timeout",
    "failed",
)  # of errors
SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
COMPILE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)


class ServerMetrics:
    """The metrics of one server, in a registry of its own; every method may be called from any thread."""

    def __init__(self, routes: Collection[str] = (), classes: Sequence[str] = ()) -> None:
        """Make the metrics, at zero.

        Args:
            routes: templates of paths that get a label value of their own, such as `/v2/models/{name}/infer`.
            classes: display names; a label of a model is an index into them.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call] # they would double the series; it holds for the whole process
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
        self._errors = Counter(
            "gradtrail_errors", "Requests without the answer asked for.", ["kind"], registry=registry
        )
        for kind in (*KINDS, OTHER):
            self._errors.labels(kind)
        self._ready = Gauge("gradtrail_ready", "1 while the server can answer, else 0.", registry=registry)
        self._ready_seconds = Gauge(
            "gradtrail_startup_seconds", "Seconds from the start of the process to ready.", registry=registry
        )
        self._queue = Gauge("gradtrail_queue_requests", "Requests that wait for a batch.", registry=registry)
        self._queue_seconds = Histogram(
            "gradtrail_queue_wait_seconds",
            "Seconds that a request waits for its batch.",
            buckets=SECONDS,
            registry=registry,
        )
        self._fill = Histogram(
            "gradtrail_batch_fill_ratio",
            "Images of a batch over the compiled size that it is padded to.",
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
            "gradtrail_compiles_in_request", "Compilations that a request had to wait for.", registry=registry
        )

    def _make_models(self) -> None:
        registry = self.registry
        model = ["role", "version"]
        self._info = Gauge(
            "gradtrail_model_info",
            "1 for each model that is loaded.",
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
            "gradtrail_rollout_state", "1 for the state that the rollout is in.", ["state"], registry=registry
        )
        self._share = Gauge(
            "gradtrail_canary_share_ratio", "Share of clients that the challenger answers.", registry=registry
        )
        self._stops = Counter(
            "gradtrail_canary_stops", "Challengers stopped, by what was beyond.", ["test"], registry=registry
        )
        self._dropped = Counter(
            "gradtrail_comparisons_dropped", "Comparisons left out because the server was busy.", registry=registry
        )
        self._fallbacks = Counter(
            "gradtrail_canary_fallbacks", "Requests of the challenger that the primary answered.", registry=registry
        )
        self._swaps = Counter("gradtrail_model_swaps", "Models replaced while serving.", ["role"], registry=registry)
        for role in ROLES:
            self._swaps.labels(role)
        self._registry_up = Gauge(
            "gradtrail_registry_up", "1 if the model registry answered the last time, else 0.", registry=registry
        )
        self._registry_up.set(1)
        self._follow_failures = Counter(
            "gradtrail_follow_failures", "New versions that could not be loaded.", ["role"], registry=registry
        )
        for role in ROLES:
            self._follow_failures.labels(role)
        self.rollout("off")

    def request(self, route: str, status: int, seconds: float, *, is_cold: bool = False) -> None:
        """Count one request; `route` is a path's template, and any other one is counted as `other`."""
        known = route if route in self._routes else OTHER
        temperature = "cold" if is_cold else "warm"
        self._request_seconds.labels(known, str(status), temperature).observe(seconds)

    def error(self, kind: str) -> None:
        """Count a request that failed, by one of `KINDS`."""
        self._errors.labels(kind if kind in KINDS else OTHER).inc()

    def ready(self, is_ready: bool, *, seconds: float | None = None) -> None:
        """Say whether the server can answer; `seconds` since the process started, when it first is."""
        self._ready.set(is_ready)
        if seconds is not None:
            self._ready_seconds.set(seconds)

    def queue(self, length: int) -> None:
        """Set the number of requests that wait."""
        self._queue.set(length)

    def waited(self, seconds: float) -> None:
        """Count a request's wait for its batch."""
        self._queue_seconds.observe(seconds)

    def batch(self, images: int, size: int) -> None:
        """Count a batch of `images` that was padded to `size`."""
        self._fill.labels(str(size)).observe(images / size)

    def compiled(self, size: int, seconds: float, *, from_cache: bool) -> None:
        """Count a program that was compiled or came from the compile cache, before it answered anybody."""
        self._compile_seconds.labels(str(size), "hit" if from_cache else "miss").observe(seconds)

    def compiled_in_request(self) -> None:
        """Count a compilation that a request waited for."""
        self._late_compiles.inc()

    def serving(self, role: Role, name: str, version: str, digest: str) -> None:
        """Say which model serves in a role; the series of the one before it end, unless it has taken the other role."""
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
            for each in self.classes:
                self._predictions.labels(role, version, each)
            if before is not None:
                self._swaps.labels(role).inc()

    def unloaded(self, role: Role) -> None:
        """Say that no model serves in a role."""
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
        """Count what a model answered to one request; late answers of a version that was replaced are left out."""
        with self._lock:
            if self._is_gone(role, version):
                return
            self._model_seconds.labels(role, version).observe(seconds)
            confidence = self._confidence.labels(role, version)
            for each in confidences:
                confidence.observe(each)
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
        """Count images that both models answered, by whether with the same label."""
        self._compared.labels("agreed").inc(agreed)
        self._compared.labels("disagreed").inc(disagreed)

    def comparison_dropped(self) -> None:
        """Count a comparison that was left out."""
        self._dropped.inc()

    def fell_back(self) -> None:
        """Count a request that the challenger failed and the primary answered."""
        self._fallbacks.inc()

    def rollout(self, state: Rollout, share: float = 0.0) -> None:
        """Set the rollout's state, and the share of clients that the challenger answers."""
        for each in STATES:
            self._state.labels(each).set(each == state)
        self._share.set(share)

    def stopped(self, test: str) -> None:
        """Count a challenger that was stopped."""
        self._stops.labels(test).inc()
        self.rollout("stopped")

    def registry_up(self, is_up: bool) -> None:
        """Say whether the registry answered."""
        self._registry_up.set(is_up)

    def follow_failed(self, role: Role) -> None:
        """Count a new version that could not be loaded."""
        self._follow_failures.labels(role).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, of `CONTENT_TYPE`."""
        return generate_latest(self.registry)
