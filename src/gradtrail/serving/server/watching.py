"""Tells the metrics what the router does."""

from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.server.batching import BatchRun
from gradtrail.serving.server.router import Answer, Loaded, Served


class MetricsWatcher:
    """A `Watcher` of the model that answers by itself, the primary one."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def loaded(self, loaded: Loaded) -> None:
        for each in loaded.sizes:
            self._metrics.compiled(each.size, each.seconds, from_cache=each.is_cached)

    def swapped(self, served: Served) -> None:
        self._metrics.serving("primary", served.about.name, served.version, served.digest)

    def batch(self, run: BatchRun, num_waiting: int) -> None:
        self._metrics.batch(run.num_images, run.size)
        for seconds in run.queue_seconds:
            self._metrics.waited(seconds)
        self._metrics.queue(num_waiting)

    def answered(self, answer: Answer, seconds: float) -> None:
        labels = answer.probabilities.argmax(axis=1).tolist()
        confidences = answer.probabilities.max(axis=1).tolist() if labels else []
        self._metrics.answered("primary", answer.by.version, seconds, labels, confidences)

    def failed(self, served: Served) -> None:
        self._metrics.failed("primary", served.version)
