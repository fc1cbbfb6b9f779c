"""A removed example is like padding, another label like the label of another split; the rest stays the same."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from factories import (
    NUM_CLASSES,
    SHAPE,
    changed_weights,
    private_config,
    random_split,
    seed_keys,
    split_of,
    train_config,
)

from gradtrail.core.batching import PADDING
from gradtrail.core.config import ConfigError
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model
from gradtrail.core.sharding import make_mesh, replicated
from gradtrail.core.train.augmentation import NO_AUGMENTATION
from gradtrail.core.train.changes import NO_CHANGES, ChangesConfig, changed_labels
from gradtrail.core.train.loop import on_device
from gradtrail.core.train.step import StepRecord, TrainState, make_init, make_step, take

DRAWN = random_split(10)
IDS = np.arange(100, 110, dtype=np.int32)[::-1].copy()
SPLIT = split_of(DRAWN.images, DRAWN.labels, IDS)
ORDER = np.array([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, PADDING, PADDING]] * 2, np.int32)
CONFIG = train_config(
    model=MLP(hidden=(5,), activation="relu", dropout=0.3),
    augmentation=dataclasses.replace(NO_AUGMENTATION, shift=1.0, rotation=10.0, scale=0.1, shear=5.0, cutout=1),
    optimizer="adamw",
    average_decay=0.9,
    accumulation_steps=2,
)
MESH = make_mesh(jax.local_devices()[:1])


def changes(**fields: Any) -> ChangesConfig:
    return dataclasses.replace(NO_CHANGES, **fields)


@functools.cache
def compiled() -> tuple[Any, Any]:
    model = Model(CONFIG.model_config(SHAPE, NUM_CLASSES))
    step = make_step(CONFIG, model, len(ORDER), MESH)
    taken = jax.jit(lambda state, examples, indices: step(state, take(examples, indices)))
    return jax.jit(make_init(CONFIG, model, len(ORDER))), taken


def run(
    config: ChangesConfig = NO_CHANGES, *, order: np.ndarray = ORDER, labels: np.ndarray = SPLIT.labels
) -> tuple[TrainState, StepRecord]:
    """Return the state after a training, and its stacked records."""
    init, step = compiled()
    split = split_of(SPLIT.images, labels, IDS)
    weights = changed_weights(split, **vars(config)) if config.enabled else None
    examples = on_device(SPLIT.images, labels, MESH, weights)
    state, records = jax.device_put(init(seed_keys(0)), replicated(MESH)), []
    for indices in order:
        state, record = step(state, examples, indices)
        records.append(record)
    return state, jax.tree.map(lambda *leaves: np.stack(leaves), *records)


def assert_measured_alike(left: StepRecord, right: StepRecord) -> None:
    """Metrics and rows are equal; rows of padding have no meaning."""
    for name in ("num_examples", "loss", "cross_entropy", "accuracy"):
        np.testing.assert_allclose(left.metrics[name], right.metrics[name], rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(left.rows.indices, right.rows.indices)
    is_row = left.rows.indices != PADDING
    np.testing.assert_array_equal(left.rows.correct[is_row], right.rows.correct[is_row])
    np.testing.assert_allclose(left.rows.probability[is_row], right.rows.probability[is_row], rtol=1e-4)


def assert_close(left: TrainState, right: TrainState, tolerance: float = 1e-4) -> None:
    for one, other in ((left.params, right.params), (left.average, right.average)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), one, other)


def test_removed_examples_are_like_padding() -> None:
    """The random numbers of the other rows stay the same."""
    expected, padded = run(order=np.where(np.isin(ORDER, [1, 4, 9]), PADDING, ORDER))
    state, records = run(changes(omit=(108, 105, 100)))
    assert_close(state, expected)
    assert_measured_alike(records, padded)
    assert np.abs(run()[1].metrics["loss"] - padded.metrics["loss"]).max() > 1e-2, "else there is nothing to compare"


def test_batch_without_examples_has_no_gradient() -> None:
    state, records = run(changes(omit=(100, 101)))
    np.testing.assert_array_equal(records.metrics["loss"] == 0, [False, False, True] * 2)
    np.testing.assert_array_equal(records.metrics["grad_norm"] == 0, [False, False, True] * 2)
    np.testing.assert_array_equal(records.metrics["num_examples"], [4, 4, 0] * 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_other_labels_are_like_those_of_another_split() -> None:
    labels = SPLIT.labels.copy()
    labels[[1, 8]] = (labels[[1, 8]] + [1, 2]) % NUM_CLASSES
    expected, other = run(labels=labels)
    pairs = ((108, int(labels[1])), (101, int(labels[8])), (105, int(labels[4])))  # the last one has this label anyway
    state, records = run(changes(relabel=pairs))
    assert_close(state, expected)
    assert_measured_alike(records, other)
    assert np.abs(run()[1].metrics["loss"] - other.metrics["loss"]).max() > 1e-2, "else there is nothing to compare"


def test_random_share_is_drawn_by_its_seed_alone() -> None:
    split = random_split(200)
    share = {"omit_fraction": 0.1, "omit_seed": 1}
    weights = changed_weights(split, **share)
    rows = np.flatnonzero(weights.any(axis=1))
    assert len(rows) == 20
    np.testing.assert_array_equal(weights[rows], -np.eye(NUM_CLASSES)[split.labels[rows]])
    other_split = split_of(split.images, 1 - split.labels % 2, split.example_id + np.int32(7))
    np.testing.assert_array_equal(np.flatnonzero(changed_weights(other_split, **share).any(axis=1)), rows)
    other_rows = np.flatnonzero(changed_weights(split, **share | {"omit_seed": 2}).any(axis=1))
    assert len({*rows} & {*other_rows}) < 10


def test_without_changes_the_labels_stay() -> None:
    for config in (NO_CHANGES, changes(omit_seed=5)):
        assert not config.enabled
        np.testing.assert_array_equal(changed_labels(config, SPLIT.labels, IDS, NUM_CLASSES), SPLIT.labels)


def test_removed_example_with_another_label_is_removed_and_the_last_label_counts() -> None:
    label = int(SPLIT.labels[0])
    pairs = ((108, 2), (109, label), (109, (label + 1) % 3))
    weights = changed_weights(SPLIT, omit=(108, 108), relabel=pairs)
    expected = np.zeros((10, NUM_CLASSES))
    expected[1, SPLIT.labels[1]] = -1
    expected[0, [label, (label + 1) % 3]] = -1, 1
    np.testing.assert_array_equal(weights, expected)


REFUSED = {
    "unknown": ({"omit": (101, 110)}, ".omit: no example 110 in the training split, which has 10 of 100 to 109"),
    "negative": ({"relabel": ((-1, 0),)}, ".relabel: no example -1 in the training split, which has 10 of 100 to 109"),
    "label": ({"relabel": ((101, 3),)}, ".relabel: label must be from 0 to 2, got 3 for example 101"),
    "all": ({"omit": tuple(range(100, 110))}, " must leave a training example, got all 10 omitted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_example_or_label_is_one_line(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        changed_weights(SPLIT, **fields)
    assert str(caught.value) == f"train.changes{message}"


def test_private_training_has_no_changes() -> None:
    with pytest.raises(ValueError, match=r"^privacy\.enabled must be false with changes of the training split"):
        private_config(changes=changes(omit=(1,)))
