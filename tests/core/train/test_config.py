"""A training is described once: what cannot be is refused by name, and one override switches each kind."""

import dataclasses
from typing import get_args

import pytest
from factories import CNN, NUM_CLASSES, SHAPE, train_config
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.nn.models import ModelKind
from gradtrail.core.nn.precision import Precision
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.optimizers import OptimizerKind
from gradtrail.core.train.schedules import ScheduleKind


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("seed", 2**32),
        ("epochs", 0),
        ("batch_size", 0),
        ("accumulation_steps", 0),
        ("label_smoothing", 1.0),
        ("label_smoothing", -0.1),
        ("clip_norm", 0.0),
        ("average_decay", 0.0),
        ("average_decay", 1.0),
        ("patience", 0),
        ("keep_epochs", (0, -1)),
    ],
)
def test_values_out_of_range_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be [^\n]*, got [^\n]*$"):
        train_config(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 0),
        ("seed", 2**32 - 1),
        ("epochs", 1),
        ("batch_size", 1),
        ("label_smoothing", 0.0),
        ("clip_norm", None),
        ("average_decay", None),
        ("average_decay", 0.999),
        ("patience", None),
        ("patience", 1),
        ("keep_epochs", ()),
    ],
)
def test_values_at_the_edge_of_the_range_are_taken(key: str, value: object) -> None:
    assert getattr(train_config(**{key: value}), key) == value


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
def test_what_averages_by_itself_is_not_averaged_again(optimizer: OptimizerKind) -> None:
    if optimizer != "schedule_free":
        assert train_config(optimizer=optimizer, average_decay=0.9).average_decay == 0.9
        return
    with pytest.raises(ValueError, match=r"^average_decay must be null .*, got 0\.9$"):
        train_config(optimizer=optimizer, average_decay=0.9)


@pytest.mark.parametrize("kind", get_args(ModelKind))
def test_only_the_chosen_network_decides(kind: ModelKind) -> None:
    config = train_config(model=kind)
    network = config.model_config(SHAPE, NUM_CLASSES)
    given = {"mlp": network.mlp, "cnn": network.cnn}
    assert given == {name: getattr(config, name) if name == kind else None for name in given}
    assert (network.kind, network.precision) == (kind, config.precision)
    assert (network.image_shape, network.num_classes) == (SHAPE, NUM_CLASSES)
    others = {name: dataclasses.replace(getattr(config, name), hidden=(7, 7)) for name in given if name != kind}
    assert dataclasses.replace(config, **others).model_config(SHAPE, NUM_CLASSES) == network


@pytest.mark.parametrize(
    ("kind", "widths"),
    [("linear", (12, 3)), ("mlp", (12, 5, 3)), ("cnn", (4 * 2 * 1, 5, 3))],  # of 4 × 3 pixels pooling leaves 2 × 1
)
def test_the_widths_are_those_of_the_chosen_network(kind: ModelKind, widths: tuple[int, ...]) -> None:
    assert train_config(model=kind, cnn=CNN).model_config(SHAPE, NUM_CLASSES).layer_widths == widths


@pytest.mark.parametrize("kind", get_args(OptimizerKind))
def test_only_the_chosen_optimizer_decides(kind: OptimizerKind) -> None:
    config = train_config(optimizer=kind)
    assert config.optimizer_config().rule is getattr(config, kind)
    others = {name: faster(config, name) for name in get_args(OptimizerKind) if name != kind}
    assert dataclasses.replace(config, **others).optimizer_config() == config.optimizer_config()
    assert dataclasses.replace(config, **{kind: faster(config, kind)}).optimizer_config() != config.optimizer_config()


@pytest.mark.parametrize("kind", get_args(ScheduleKind))
def test_only_the_chosen_schedule_decides(kind: ScheduleKind) -> None:
    config = train_config(schedule=kind, clip_norm=0.5)
    assert config.optimizer_config().schedule is getattr(config, kind)
    assert config.optimizer_config().clip_norm == 0.5
    assert [name for name in get_args(ScheduleKind) if getattr(config, name) is config.optimizer_config().schedule] == [
        kind
    ]


@pytest.mark.parametrize("precision", get_args(Precision))
def test_only_float16_scales_the_loss(precision: Precision) -> None:
    config = train_config(precision=precision)
    assert config.scales_loss == (precision == "float16")
    assert config.model_config(SHAPE, NUM_CLASSES).precision == precision


def faster(config: TrainConfig, optimizer: str) -> object:
    rule = getattr(config, optimizer)
    return dataclasses.replace(rule, learning_rate=2 * rule.learning_rate)
