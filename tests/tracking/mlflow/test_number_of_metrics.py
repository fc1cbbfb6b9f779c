"""No configuration gives a training's run more than forty metrics, those of the system and of the runs below included.

Names come from the functions that measure, with made-up histories and predictions: with every part that a config adds.
"""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import make_engine, random_split, train_config

from gradtrail.core.evaluate.metrics import EvaluateConfig
from gradtrail.core.train.history import History, on_host
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.step import StepRecord
from gradtrail.stages.artifacts.members import over_members
from gradtrail.stages.evaluate import members as evaluate_members
from gradtrail.stages.evaluate.members import Predictions
from gradtrail.stages.train import members as train_members
from gradtrail.stages.train import tables
from gradtrail.tracking.mlflow import naming
from gradtrail.tracking.mlflow.artifacts import curves
from gradtrail.tracking.mlflow.naming import is_headline, is_logged, metric_name
from gradtrail.tracking.mlflow.tracker import SYSTEM_METRICS

MOST = 40
SPLIT = random_split(8)
COMPILE = {f"compile/{name}" for name in ("total_seconds", "cache_hit_rate", "unplanned")}
EPOCHS = [
    {"epoch": number, **dict.fromkeys(("loss", "cross_entropy", "accuracy", "validation_loss"), 0.5)}
    for number in (1, 2)
]


@pytest.fixture(scope="module")
def weights() -> Any:
    engine, _ = make_engine(train_config(model="linear"), SPLIT)
    return on_host(engine.init(keys_of(train_config().seeds_of(0))).params)


def history_of(precision: str, parts: int, weights: Any) -> History:
    """Return a history as `core/train` makes it, with what this precision and these parts of a batch add."""
    step = np.ones(3, np.float32)
    has_scale, has_parts = precision == "float16", parts > 1
    record = StepRecord(
        num_examples=np.full(3, 8, np.int32),
        **dict.fromkeys(("loss", "cross_entropy", "accuracy", "grad_norm", "learning_rate"), step),
        part_grad_norm=step * np.float32(1.1) if has_parts else None,
        loss_scale=step if has_scale else None,
        skipped=np.zeros(3, bool) if has_scale else None,
        rows=None,
    )
    history = History((), weights, precision=precision)
    history.steps = [record, record]
    history.epochs = [tables.EpochRecord(**values, validation_accuracy=0.5) for values in EPOCHS]
    return history


def logged(stage: str, metrics: dict[str, Any]) -> set[str]:
    return {metric_name(stage, key) for key in metrics if is_logged(stage, key, metrics)}


def of_training(history: History, precision: str, parts: int, count: int) -> set[str]:
    config = train_config(precision=precision, accumulation_steps=parts, batch_size=8)
    measured = over_members([tables.measure(history, config, 6)] * count)
    member = train_members.WrittenMember(
        folder=Path(), epochs=tables.epoch_table(history.epochs), metrics={}, seconds=1.0
    )
    written = dict.fromkeys(range(count), member)
    epochs, steps = train_members.mean_epochs(written), tables.step_table(history.steps)
    timed = {metric_name("train", key) for key in {*train_members.measure_time(written), *COMPILE}}
    return logged("train", measured) | {*curves(epochs, steps, 6), "train/elapsed_seconds"} | timed


@functools.cache
def of_evaluation(count: int, *, corrected: bool) -> set[str]:
    rng = np.random.default_rng(0)
    message = [
        Predictions(
            seed=seed,
            weights=Path(f"{seed}.safetensors"),
            epoch=2,
            **{split: rng.normal(size=(8, 3)) for split in ("validation", "test")},
        )
        for seed in range(count)
    ]
    test = dataclasses.replace(SPLIT, corrected_labels=(SPLIT.labels + 1) % 3) if corrected else SPLIT
    config = EvaluateConfig(weights="final", batch_size=8, calibration_bins=3, num_mistakes=5)
    return logged("evaluate", evaluate_members.evaluate(message, (SPLIT, test), config).metrics(test)) | {
        metric_name("evaluate", key) for key in COMPILE
    }


def below(stage: str, precision: str, measured: set[str]) -> set[str]:
    """Return what a training's run shows of a stage below it."""
    return {name for name in measured if is_headline(name, stage, precision)}


@pytest.mark.parametrize(
    ("precision", "parts", "count", "corrected"),
    list(itertools.product(("float32", "bfloat16", "float16"), (1, 2), (1, 2, 5), (False, True))),
)
def test_training_has_at_most_forty_metrics(
    precision: str, parts: int, count: int, corrected: bool, weights: Any
) -> None:
    logged_by_training = of_training(history_of(precision, parts, weights), precision, parts, count)
    evaluated = of_evaluation(count, corrected=corrected)
    rest = {metric_name(stage, key) for stage in ("gradients", "profile") for key in naming._HEADLINES[stage]}
    headlines = below("evaluate", precision, evaluated)
    headlines |= {name for stage in ("gradients", "profile") for name in below(stage, precision, rest)}
    assert {"eval/accuracy", "profile/train_step_flops", "gradients/noise_scale_typical"} <= headlines
    system = {f"system/{name}" for name in SYSTEM_METRICS}
    assert len(logged_by_training | headlines | system) <= MOST, sorted(logged_by_training | headlines | system)
    assert len(evaluated | system) <= MOST, sorted(evaluated)
