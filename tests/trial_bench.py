"""A real router with a primary and a challenger on trial; the models are plain functions."""

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
from gradtrail.serving.server.router import Answer, Loaded, Served
from gradtrail.serving.slo import read_slo

CLASSES = tuple(map(str, range(10)))
SLO = Path(__file__).parents[1] / "deploy/slo.yaml"
Answers = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class About:
    """The part of a manifest that the router reads."""

    digest: str
    name: str = "digits"
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    image_shape: tuple[int, int] = (2, 2)
    classes: tuple[str, ...] = CLASSES


@dataclass
class Fake:
    """A model that is a function."""

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
    """A router with a primary and a trial."""

    trial: Trial

    def load(self, run: Answers, version: str, **about: Any) -> Served:
        loaded = Loaded(model=Fake(About(f"digest {version}", **about), run), version=version, sizes=())  # type: ignore[arg-type]
        return self.trial.serve(loaded)

    async def ask(self, number: int, client: str | None = None) -> Answer:
        images = np.full((1, 2, 2), number % 10, np.uint8)
        return await self.trial.answer(images, client or f"client {number}", self.trial.current)

    async def settle(self) -> None:
        """Wait for the comparisons."""
        while self.trial._tasks:
            await asyncio.gather(*self.trial._tasks)

    def value(self, name: str, **labels: str) -> float | None:
        return self.trial.metrics.registry.get_sample_value(name, labels)


@contextmanager
def bench(share: float = 0.1, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[Bench]:
    """Make a bench in a running event loop."""
    config = TrialConfig(share=share, thresholds=read_slo(SLO).canary, patience_seconds=patience_seconds)
    trial = Trial(batching=BatchingConfig(max_wait_ms=0), metrics=ServerMetrics((), CLASSES), config=config)
    made = Bench(trial)
    trial.swap(made.load(sound, "1"))
    try:
        yield made
    finally:
        trial.challenge(None)
        trial.close()
