"""A real router with a primary and a challenger on trial: models that are told what to answer."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.rollout.trial import PATIENCE_SECONDS, Trial, TrialConfig
from gradtrail.serving.server.batching import BatchingConfig
from gradtrail.serving.server.router import Answer, Loaded, Router, Served
from gradtrail.serving.server.watching import MetricsWatcher
from gradtrail.serving.slo import read_slo

CLASSES = tuple(map(str, range(10)))
SLO = Path(__file__).parents[1] / "deploy/slo.yaml"
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
def bench(share: float, patience_seconds: float) -> Iterator[Bench]:
    """Make a bench in a running event loop."""
    metrics = ServerMetrics((), CLASSES)
    router = Router(batching=BatchingConfig(max_wait_ms=0), watcher=MetricsWatcher(metrics))
    config = TrialConfig(share=share, limits=read_slo(SLO).canary, patience_seconds=patience_seconds)
    trial = Trial(config, router, metrics)
    made = Bench(router, trial, metrics)
    router.swap(made.load(sound, "1"))
    router.rollout = trial
    try:
        yield made
    finally:
        trial.challenge(None)
        router.close()


def run(scenario: Callable[[Bench], Any], share: float = 0.1, patience_seconds: float = PATIENCE_SECONDS) -> None:
    async def main() -> None:
        with bench(share, patience_seconds) as made:
            await scenario(made)

    asyncio.run(main())
