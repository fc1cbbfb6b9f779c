"""Scores of labels against their definitions, by networks that were not trained on the example."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import NUM_CLASSES, SHAPE, audit_config, new_compiler, random_split

from gradtrail.core.audit.ensemble import (
    CrossValidation,
    OutOfFoldLogits,
    compile_networks,
    cross_validate,
)
from gradtrail.core.audit.scores import CANDIDATES, label_scores, probabilities
from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.nn import losses
from gradtrail.core.nn.models import Model

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(scale=3, size=(3, 50, 4)).astype(np.float32)
LABELS = RNG.integers(0, 4, 50).astype(np.int32)


def test_scores_of_one_network_are_those_of_the_losses() -> None:
    scores = label_scores(LOGITS[:1], LABELS, 1.0)
    assert np.allclose(scores["el2n"], losses.el2n(jnp.array(LOGITS[0]), jnp.array(LABELS)), atol=1e-5)
    assert np.allclose(scores["log_margin"], -losses.margin(jnp.array(LOGITS[0]), jnp.array(LABELS)), atol=1e-5)
    result = 1 - losses.label_probability(jnp.array(LOGITS[0]), jnp.array(LABELS))
    assert np.allclose(scores["self_confidence"], result, atol=1e-5)
    assert np.array_equal(scores["disagreement"], ~losses.correct(jnp.array(LOGITS[0]), jnp.array(LABELS)))


def test_margin_of_several_networks_is_that_of_the_mean_probability() -> None:
    mean = probabilities(LOGITS, 2.0).mean(axis=0)
    for row, (score, label) in enumerate(zip(label_scores(LOGITS, LABELS, 2.0)["margin"], LABELS, strict=True)):
        assert score == pytest.approx(np.delete(mean[row], label).max() - mean[row, label])


def test_odds_are_bayes_rule_for_the_two_kinds_of_noise() -> None:
    mean = probabilities(LOGITS, 1.0).mean(axis=0)
    for row, (score, y) in enumerate(zip(label_scores(LOGITS, LABELS, 1.0)["odds"], LABELS, strict=True)):
        p = mean[row]
        of_wrong = sum(p[j] * (1 / 3 + p[y] / (1 - p[j])) / 2 for j in range(4) if j != y)
        assert score == pytest.approx(np.log(of_wrong / p[y]))


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_less_probable_label_is_more_suspicious(name: str) -> None:
    logits = np.array([[[5.0, 1.0, -2.0]] * 3], np.float32)
    scores = label_scores(logits, np.array([0, 1, 2], np.int32), 1.0)[name]
    assert np.all(np.diff(scores) > 0) or (name == "disagreement" and list(scores) == [0, 1, 1])


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
