"""No network evaluates an example that it was trained on."""

import copy
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from factories import NUM_CLASSES, SHAPE, audit_config, new_compiler, random_split

from gradtrail.core.audit.labels import OutOfFold
from gradtrail.core.audit.networks import CrossValidation
from gradtrail.core.nn.models import Model
from gradtrail.core.xla import passes

CONFIG = audit_config()
TRAIN, TEST = random_split(11), random_split(6)


def compile_for() -> CrossValidation:
    model = Model(CONFIG.train_config().model_config(SHAPE, NUM_CLASSES))
    return CrossValidation(model, CONFIG, len(TRAIN), compiler=new_compiler())


networks = functools.cache(compile_for)


def out_of_fold(labels: np.ndarray = TRAIN.labels, *, label_set: int = 0) -> dict[str, OutOfFold]:
    splits = {"train": dataclasses.replace(TRAIN, labels=labels), "test": TEST}
    return networks().run_label_set(splits, label_set, lambda *_, **__: None)


def test_training_examples_have_one_network_per_round_and_others_have_all() -> None:
    result = out_of_fold()
    assert result["train"].logits.shape == (2, 11, NUM_CLASSES)
    assert result["test"].logits.shape == (6, 6, NUM_CLASSES)
    assert all(np.all(split.logits.any(axis=-1)) and (split.grad_norm > 0).all() for split in result.values())


def test_no_network_was_trained_on_an_example_that_it_evaluates() -> None:
    before = out_of_fold()["train"].logits
    for row in range(len(TRAIN)):
        labels = TRAIN.labels.copy()
        labels[row] = (labels[row] + 1) % NUM_CLASSES
        after = out_of_fold(labels)["train"].logits
        assert np.array_equal(after[:, row], before[:, row])
        assert not np.array_equal(after, before)


def test_large_images_are_evaluated_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = out_of_fold()["test"]
    monkeypatch.setattr(passes, "TEMPORARY_BYTES", {"cpu": 1})
    small = compile_for()
    assert (small.logits.batch_size, small.grad_norms.batch_size) == (1, 1)
    result = small.run_label_set({"train": TRAIN, "test": TEST}, 0, lambda *_, **__: None)["test"]
    for one, other in ((result.logits, expected.logits), (result.grad_norm, expected.grad_norm)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_another_set_of_labels_has_other_trainings() -> None:
    assert not np.array_equal(out_of_fold()["train"].logits, out_of_fold(label_set=1)["train"].logits)


def test_labels_are_planted_in_the_training_split_and_all_epochs_are_reported() -> None:
    epochs: list[float] = []
    splits = {"train": TRAIN, "test": TEST}
    result, planted = networks().run(splits, advance=lambda amount, message="": epochs.append(amount))
    assert np.array_equal(result["test"].logits, out_of_fold()["test"].logits)
    assert [int(np.sum(copy.labels != TRAIN.labels)) for copy in planted.values()] == [2, 2]
    assert sum(epochs) == CONFIG.num_epochs


def test_a_training_that_diverges_is_one_line() -> None:
    run_steps, broken = networks().training.run_steps, copy.copy(networks())

    def diverge(*args: object) -> object:
        state, records = run_steps(*args)
        return state, dataclasses.replace(
            records, metrics=records.metrics | {"loss": records.metrics["loss"] * jnp.nan}
        )

    broken.training = copy.copy(broken.training)
    broken.training.run_steps = dataclasses.replace(run_steps, call=diverge)
    with pytest.raises(FloatingPointError, match=r"epoch 1; lower audit\.learning_rate"):
        broken.run_label_set({"train": TRAIN}, 0, lambda *_, **__: None)
