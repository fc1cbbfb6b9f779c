"""A training is described once: what cannot be is refused by name, and one override switches each kind."""

import dataclasses
from typing import get_args

import pytest
from factories import NUM_CLASSES, SHAPE, train_config

from gradtrail.core.nn.models import ModelKind
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.optimizers import OptimizerKind


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


def faster(config: TrainConfig, optimizer: str) -> object:
    rule = getattr(config, optimizer)
    return dataclasses.replace(rule, learning_rate=2 * rule.learning_rate)
