"""The logits of an example are by networks not trained on it: its label and its place in the split change nothing."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from factories import NUM_CLASSES, SHAPE, audit_config, new_compiler, random_split

from gradtrail.core.audit.ensemble import (
    CrossValidation,
    OutOfFoldLogits,
    compile_networks,
    cross_validate,
)
from gradtrail.core.common.split import Split
from gradtrail.core.common.validation import ConfigError
from gradtrail.core.nn.models import Model

CONFIG = audit_config()
TRAIN, TEST = random_split(11), random_split(6)


@functools.cache
def networks() -> CrossValidation:
    model = Model(CONFIG.train_config().model_config(SHAPE, NUM_CLASSES))
    return compile_networks(model, CONFIG, len(TRAIN), compiler=new_compiler())


def out_of_fold(train: Split, *, label_set: int = 0, steps_per_call: int = 100) -> dict[str, OutOfFoldLogits]:
    return cross_validate(
        networks(),
        train,
        {"test": TEST},
        CONFIG,
        label_set=label_set,
        steps_per_call=steps_per_call,
        advance=lambda *_, **__: None,
    )


def test_training_examples_have_one_network_per_round_and_others_have_all() -> None:
    result = out_of_fold(TRAIN)
    assert result["train"].logits.shape == (2, 11, NUM_CLASSES)
    assert result["test"].logits.shape == (6, 6, NUM_CLASSES)
    assert all(np.isfinite(one.logits).all() and (one.grad_norm > 0).all() for one in result.values())


def test_no_network_was_trained_on_an_example_that_it_evaluates() -> None:
    before = out_of_fold(TRAIN)["train"].logits
    for row in range(len(TRAIN)):
        labels = TRAIN.labels.copy()
        labels[row] = (labels[row] + 1) % NUM_CLASSES
        after = out_of_fold(dataclasses.replace(TRAIN, labels=labels))["train"].logits
        assert np.array_equal(after[:, row], before[:, row])
        assert not np.array_equal(after, before)


def test_steps_per_call_change_no_bit_and_another_set_of_labels_does() -> None:
    once, again, other = out_of_fold(TRAIN), out_of_fold(TRAIN, steps_per_call=1), out_of_fold(TRAIN, label_set=1)
    assert np.array_equal(once["test"].logits, again["test"].logits)
    assert np.array_equal(once["train"].grad_norm, again["train"].grad_norm)
    assert not np.array_equal(once["train"].logits, other["train"].logits)


def test_too_large_batch_is_one_line_with_the_key() -> None:
    config = audit_config(batch_size=8)
    model = Model(config.train_config().model_config(SHAPE, NUM_CLASSES))
    with pytest.raises(ConfigError, match=r"^audit\.batch_size must be at most .* 7, got 8$"):
        compile_networks(model, config, len(TRAIN), compiler=new_compiler())


def test_a_training_that_diverges_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run_steps = networks().engine.run_steps

    def nan_after(*args: object) -> object:
        state, records = run_steps(*args)
        return state, dataclasses.replace(records, loss=records.loss * jax.numpy.nan)

    broken_steps = dataclasses.replace(run_steps, call=nan_after)
    broken = dataclasses.replace(networks(), engine=dataclasses.replace(networks().engine, run_steps=broken_steps))
    with pytest.raises(FloatingPointError, match=r"epoch 1; lower audit\.learning_rate"):
        cross_validate(broken, TRAIN, {}, CONFIG, label_set=0, steps_per_call=100, advance=lambda *_, **__: None)
