"""Evaluated trainings for the tests of this folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from registered import evaluation, training
from releasing import RIGHT, judge


@pytest.fixture
def model(client: MlflowClient, exported: Callable[[int], Path]) -> Callable[..., Run]:
    """Makes an evaluated training with an export, predictions and a verdict."""

    def make(seed: int, *, wrong: int = 5, verdict: str = "pass", first: int = 0) -> Run:
        run = training(client, seed=seed, export=exported(seed % 4))
        predicted = RIGHT.copy()
        predicted[first : first + wrong] = (predicted[first : first + wrong] + 1) % 10
        evaluation(client, run, predicted)
        judge(client, run, verdict)
        return run

    return make
