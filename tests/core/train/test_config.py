"""A training is described once: what cannot be is refused by name, and one override switches each kind."""

import dataclasses
from typing import get_args

import pytest
from factories import NUM_CLASSES, SHAPE, train_config
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.nn.models import ModelKind
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.optimizers import OptimizerKind
from gradtrail.core.train.schedules import ScheduleKind


@given(st.integers(1, 12), st.integers(1, 12))
def test_the_parts_of_a_batch_are_equal_or_refused(batch_size: int, accumulation_steps: int) -> None:
    sizes = {"batch_size": batch_size, "accumulation_steps": accumulation_steps}
    if batch_size % accumulation_steps == 0:
        assert train_config(**sizes).accumulation_steps == accumulation_steps
        return
    message = f"^accumulation_steps must divide batch_size {batch_size}, got {accumulation_steps}$"
    with pytest.raises(ValueError, match=message):
        train_config(**sizes)


@pytest.mark.parametrize("optimizer", get_args(OptimizerKind))
def test_schedule_free_refuses_a_moving_average(optimizer: OptimizerKind) -> None:
    if optimizer != "schedule_free":
        assert train_config(optimizer=optimizer, average_decay=0.9).average_decay == 0.9
        return
    with pytest.raises(ValueError, match=r"^average_decay must be null .*, got 0\.9$"):
        train_config(optimizer=optimizer, average_decay=0.9)


@pytest.mark.parametrize("kind", get_args(ModelKind))
def test_only_the_chosen_network_decides(kind: ModelKind) -> None:
    config = train_config(model=kind)
    network = config.model_config(SHAPE, NUM_CLASSES)
    blocks = {"mlp": network.mlp, "cnn": network.cnn}
    assert blocks == {name: getattr(config, name) if name == kind else None for name in blocks}
    assert (network.kind, network.precision) == (kind, config.precision)
    assert (network.image_shape, network.num_classes) == (SHAPE, NUM_CLASSES)
    other_values = {name: dataclasses.replace(getattr(config, name), hidden=(7, 7)) for name in blocks if name != kind}
    assert dataclasses.replace(config, **other_values).model_config(SHAPE, NUM_CLASSES) == network


@pytest.mark.parametrize("kind", get_args(OptimizerKind))
def test_only_the_chosen_optimizer_decides(kind: OptimizerKind) -> None:
    config = train_config(optimizer=kind)
    assert config.optimizer_config().rule is getattr(config, kind)
    other_values = {name: faster(config, name) for name in get_args(OptimizerKind) if name != kind}
    assert dataclasses.replace(config, **other_values).optimizer_config() == config.optimizer_config()
    assert dataclasses.replace(config, **{kind: faster(config, kind)}).optimizer_config() != config.optimizer_config()


@pytest.mark.parametrize("kind", get_args(ScheduleKind))
def test_only_the_chosen_schedule_decides(kind: ScheduleKind) -> None:
    config = train_config(schedule=kind, clip_norm=0.5)
    assert config.optimizer_config().schedule is getattr(config, kind)
    assert config.optimizer_config().clip_norm == 0.5
    assert [name for name in get_args(ScheduleKind) if getattr(config, name) is config.optimizer_config().schedule] == [
        kind
    ]


def faster(config: TrainConfig, optimizer: str) -> object:
    rule = getattr(config, optimizer)
    return dataclasses.replace(rule, learning_rate=2 * rule.learning_rate)
