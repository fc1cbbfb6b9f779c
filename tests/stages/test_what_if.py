"""Predicted effects are those of training again."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from factories import (
    NUM_CLASSES,
    SHAPE,
    changed_weights,
    dataset_info,
    new_compiler,
    params_on_device,
    random_split,
    seed_keys,
    train_config,
)

from gradtrail.core.data import Split
from gradtrail.core.gradients.metagradient import Metagradient, compile_metagradient
from gradtrail.core.gradients.what_if import make_outputs
from gradtrail.core.nn.losses import CROSS_ENTROPY, cross_entropy, log_odds
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.loop import on_device
from gradtrail.core.train.optimizers import SGD
from gradtrail.stages import what_if
from gradtrail.stages.model.weights import WeightsInfo, write_weights

SLOW_SGD = SGD(learning_rate=0.02, momentum=0.9, nesterov=True)
CONFIG = train_config(model="linear", optimizer=SLOW_SGD, members=2, epochs=3, batch_size=20, clip_norm=None)
MODEL = Model(CONFIG.model_config(SHAPE, NUM_CLASSES))
TRAIN = dataclasses.replace(random_split(100), example_id=np.arange(100, dtype=np.int32)[::-1] * 3)
TEST = random_split(112)[100:]
SPLITS = {"train": TRAIN, "test": TEST, "validation": random_split(119)[112:]}
NAMES = ["100", "101", "validation_loss"]


@functools.cache
def compiled() -> tuple[Metagradient, Examples]:
    outputs = make_outputs(MODEL, TEST[:2], SPLITS["validation"], CONFIG.batch_size)
    metagradient = compile_metagradient(CONFIG, MODEL, len(TRAIN), outputs, memory_bytes=2**30, compiler=new_compiler())
    unchanged = np.zeros((len(TRAIN), NUM_CLASSES), np.float32)
    return metagradient, on_device(TRAIN.images, TRAIN.labels, metagradient.program.mesh, unchanged)


apply = jax.jit(MODEL.apply)


def logits_of(params: Params, split: Split) -> jax.Array:
    return apply(params, split.images)


def margins(params: Params) -> np.ndarray:
    return np.asarray(jax.jit(log_odds)(logits_of(params, TEST), TEST.labels))


@functools.cache
def influence() -> pd.DataFrame:
    derivative = what_if.mean_derivative(CONFIG, *compiled())
    logits = np.random.default_rng(0).normal(size=(len(TRAIN), NUM_CLASSES))
    return what_if.influence_table(TRAIN, logits, NAMES, derivative)


def output_means(**changes: object) -> np.ndarray:
    """Train the members with changes; return their mean outputs."""
    metagradient, examples = compiled()
    examples = dataclasses.replace(examples, weight_changes=jax.device_put(changed_weights(TRAIN, **changes)))
    values = [metagradient.outputs(metagradient.train(seed_keys(seed), examples)[1][-1])[0] for seed in (0, 1)]
    return np.mean(values, axis=0, dtype=np.float64)


@pytest.mark.parametrize("kind", ["remove", "relabel"])
def test_predicted_changes_are_those_of_training_again(kind: str) -> None:
    before, predicted, real = output_means(), [], []
    for row in range(0, 100, 10):
        example = influence().iloc[row]
        name = int(example["example_id"])
        changes = {"omit": (name,)} if kind == "remove" else {"relabel": ((name, int(example["proposed_label"])),)}
        predicted.append([example[f"{kind}/{output}"] for output in NAMES])
        real.append(output_means(**changes) - before)
    for column in range(len(NAMES)):
        one, other = np.array(predicted)[:, column], np.array(real)[:, column]
        assert np.corrcoef(one, other)[0, 1] > 0.99
        assert np.sum(one * other) / np.sum(one**2) == pytest.approx(1, abs=0.1)


def test_convex_training_is_smooth_and_the_bar_sees_every_step() -> None:
    steps: list[int] = []
    smoothness = what_if.measure_smoothness(CONFIG, *compiled(), TRAIN, margins, steps.append)
    assert smoothness > 0.98
    assert steps == [compiled()[0].program.num_steps] * what_if.TRAININGS


def test_proposed_label_is_the_most_probable_other_class() -> None:
    logits = np.float32([[3, 2, 1], [3, 2, 1], [1, 2, 3]])
    train = dataclasses.replace(TRAIN[:3], labels=np.int32([0, 1, 2]))
    table = what_if.influence_table(train, logits, ["5"], np.zeros((1, 3, 3), np.float32))
    assert table["proposed_label"].tolist() == [1, 0, 1]
    assert list(table) == ["example_id", "label", "proposed_label", "remove/5", "relabel/5"]
    assert logits[0, 0] == 3


def test_outputs_are_means_over_members(tmp_path: Path) -> None:
    about = WeightsInfo(model=MODEL.config, loss=CROSS_ENTROPY, dataset=dataset_info(), epoch=1)
    each, validation = [params_on_device(MODEL, seed) for seed in (0, 1)], SPLITS["validation"]
    paths = {seed: tmp_path / f"{seed}.safetensors" for seed in (0, 1)}
    for seed, params in enumerate(each):
        write_weights(paths[seed], params, about)
    compiled_margins = what_if.compile_margins(MODEL, TEST, compiler=new_compiler())
    networks = what_if.predict_members(compiled_margins.predict, compiled_margins, paths, dataset_info(), SPLITS)
    losses = [jax.jit(cross_entropy)(logits_of(params, validation), validation.labels) for params in each]
    np.testing.assert_allclose(networks.margins, np.mean([margins(params) for params in each], axis=0), rtol=1e-5)
    assert networks.validation_loss == pytest.approx(np.mean(losses))

    table = what_if.output_table(networks, TEST, np.array([3, 1]))
    assert table["output"].tolist() == ["103", "101", "validation_loss"]
    assert table["label"].tolist()[:2] == TEST.labels[[3, 1]].tolist()
    assert table["value"].tolist() == [*networks.margins[[3, 1]].tolist(), networks.validation_loss]
    logits = np.mean([logits_of(params, TEST) for params in each], axis=0)
    assert table["predicted"].tolist()[:2] == logits.argmax(axis=1)[[3, 1]].tolist()


def test_chaotic_training_is_told_what_may_help() -> None:
    assert what_if.describe(0.95).startswith("metasmoothness 0.95, at least 0.9: two equal changes ")
    words = what_if.describe(0.12)
    assert words.startswith("metasmoothness 0.12, below 0.9: ")
    assert words.endswith(
        "a smooth activation (gelu, silu), a lower learning rate, a larger batch or fewer epochs may help"
    )


def test_mistakes_are_chosen_from_the_nearest_to_the_worst() -> None:
    margins = np.array([-1.0, 2.0, -5.0, -0.1, 3.0, -3.0, -4.0, -0.05])
    is_mistake = np.array([1, 0, 1, 1, 0, 1, 1, 0], bool)  # the last one is right, unsurely
    choose = functools.partial(what_if.choose_examples, margins, is_mistake)
    assert choose(3).tolist() == [3, 5, 2]
    assert choose(1).tolist() == [3]
    assert choose(6).tolist() == [7, 3, 0, 5, 6, 2]
