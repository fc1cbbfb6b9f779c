"""Judges know no example that they judge: its label and its place in the split change nothing of what they say."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from factories import NUM_CLASSES, SHAPE, audit_config, new_compiler, random_split

from gradtrail.core.audit.ensemble import Judgement, Judges, compile_judges, folds_of, judge, num_visits, training_size
from gradtrail.core.common.split import Split
from gradtrail.core.common.validation import ConfigError
from gradtrail.core.nn.models import Model

CONFIG = audit_config()
TRAIN, TEST = random_split(11), random_split(6)


@functools.cache
def judges() -> Judges:
    model = Model(CONFIG.train_config().model_config(SHAPE, NUM_CLASSES))
    return compile_judges(model, CONFIG, len(TRAIN), compiler=new_compiler())


def judged(train: Split, *, labelling: int = 0, steps_per_call: int = 100) -> dict[str, Judgement]:
    return judge(
        judges(),
        train,
        {"test": TEST},
        CONFIG,
        labelling=labelling,
        steps_per_call=steps_per_call,
        advance=lambda *_, **__: None,
    )


def test_each_training_example_has_a_judge_in_each_round_and_others_have_all() -> None:
    found = judged(TRAIN)
    assert found["train"].logits.shape == (2, 11, NUM_CLASSES)
    assert found["test"].logits.shape == (6, 6, NUM_CLASSES)
    assert all(np.isfinite(one.logits).all() and (one.grad_norm > 0).all() for one in found.values())


def test_no_judge_of_an_example_was_trained_on_it() -> None:
    before = judged(TRAIN)["train"].logits
    for row in range(len(TRAIN)):
        labels = TRAIN.labels.copy()
        labels[row] = (labels[row] + 1) % NUM_CLASSES
        after = judged(dataclasses.replace(TRAIN, labels=labels))["train"].logits
        assert np.array_equal(after[:, row], before[:, row])
        assert not np.array_equal(after, before)


def test_steps_per_call_change_no_bit_and_another_set_of_labels_does() -> None:
    once, again, other = judged(TRAIN), judged(TRAIN, steps_per_call=1), judged(TRAIN, labelling=1)
    assert np.array_equal(once["test"].logits, again["test"].logits)
    assert np.array_equal(once["train"].grad_norm, again["train"].grad_norm)
    assert not np.array_equal(once["train"].logits, other["train"].logits)


def test_folds_are_equally_large_and_drawn_anew_in_each_round() -> None:
    first, second = (folds_of(100, CONFIG, round_) for round_ in range(2))
    assert sorted(np.bincount(first)) == [33, 33, 34]
    assert training_size(100, 3) == 66
    assert not np.array_equal(first, second)


def test_progress_ends_at_the_announced_number_of_visits() -> None:
    seen: list[int] = []
    said: list[str] = []

    def advance(visits: int, message: str = "") -> None:
        seen.append(visits)
        said.extend([message] if message else [])

    train = random_split(12)
    model = Model(CONFIG.train_config().model_config(SHAPE, NUM_CLASSES))
    own = compile_judges(model, CONFIG, len(train), compiler=new_compiler())
    judge(own, train, {"test": TEST}, CONFIG, labelling=0, steps_per_call=1, advance=advance)
    assert sum(seen) == num_visits(train, {"test": TEST}, CONFIG)
    assert said == [f"network {number} of 6" for number in range(1, 7)]


def test_a_batch_that_is_too_large_is_one_line_with_the_key_of_the_audit() -> None:
    config = audit_config(batch_size=8)
    model = Model(config.train_config().model_config(SHAPE, NUM_CLASSES))
    with pytest.raises(ConfigError, match=r"^audit\.batch_size must be at most .* 7, got 8$"):
        compile_judges(model, config, len(TRAIN), compiler=new_compiler())


def test_a_training_that_diverges_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run_steps = judges().engine.run_steps

    def nan_after(*args: object) -> object:
        state, records = run_steps(*args)
        return state, dataclasses.replace(records, loss=records.loss * jax.numpy.nan)

    broken_steps = dataclasses.replace(run_steps, call=nan_after)
    broken = dataclasses.replace(judges(), engine=dataclasses.replace(judges().engine, run_steps=broken_steps))
    with pytest.raises(FloatingPointError, match=r"epoch 1; lower audit\.learning_rate"):
        judge(broken, TRAIN, {}, CONFIG, labelling=0, steps_per_call=100, advance=lambda *_, **__: None)
