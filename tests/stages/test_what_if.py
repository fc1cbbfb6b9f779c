"""Predicted effects are those of training again."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from exports import random_params
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
from gradtrail.core.gradients.metagradient import Metagradient
from gradtrail.core.gradients.what_if import WhatIfConfig
from gradtrail.core.nn.losses import cross_entropy, log_odds
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.train.loop import on_device
from gradtrail.core.train.optimizers import SGD
from gradtrail.core.train.start import ReadStart, StartConfig
from gradtrail.core.xla.compiler import CompiledFunction
from gradtrail.stages import what_if
from gradtrail.stages.model.weights import WeightsInfo, write_weights
from gradtrail.stages.what_if import WhatIf

SLOW_SGD = SGD(learning_rate=0.02, momentum=0.9, nesterov=True)
CONFIG = train_config(model="linear", optimizer=SLOW_SGD, members=2, epochs=3, batch_size=20, clip_norm=None)
MODEL = Model(CONFIG.model_config(SHAPE, NUM_CLASSES))
TRAIN = dataclasses.replace(random_split(100), example_id=np.arange(100, dtype=np.int32)[::-1] * 3)
TEST = random_split(112)[100:]
SPLITS = {"train": TRAIN, "test": TEST, "validation": random_split(119)[112:]}
NAMES = ["100", "101", "validation_loss"]


apply = jax.jit(MODEL.apply)


def logits_of(params: Params, split: Split) -> jax.Array:
    return apply(params, split.images)


def margins(params: Params) -> np.ndarray:
    return np.asarray(jax.jit(log_odds)(logits_of(params, TEST), TEST.labels))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> WhatIf:
    """The question about two test examples and the validation loss, compiled."""
    weights = {seed: tmp_path_factory.mktemp("models") / f"{seed}.safetensors" for seed in CONFIG.seeds}
    about = WeightsInfo(model=MODEL.config, loss=CONFIG.loss, dataset=dataset_info(), epoch=1)
    for seed, path in weights.items():
        write_weights(path, random_params(MODEL, seed), about)
    config = WhatIfConfig(test_examples=(), num_examples=2, memory_mib=1024)
    inputs = {"config": config, "train_config": CONFIG, "info": dataset_info(), "splits": SPLITS}
    result = WhatIf(**inputs, weights=weights, rows=np.array([0, 1]))
    result.compile(new_compiler())
    return result


def test_training_starts_from_the_weights_of_the_params(asked: WhatIf) -> None:
    path = asked.weights[1]
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    start = StartConfig(weights=str(path), sha256=sha256, freeze=(), rate=0.5)
    tuned = dataclasses.replace(asked, train_config=dataclasses.replace(CONFIG, start=start))
    tuned.compile(new_compiler())
    examples = on_device(TRAIN.images, TRAIN.labels, tuned.metagradient.training.mesh, changed_weights(TRAIN))
    first = next(tuned.metagradient.states(seed_keys(5), examples))
    jax.tree.map(np.testing.assert_array_equal, first.params, random_params(MODEL, 1))
    assert tuned.train_config.start == ReadStart(**vars(start), drawn=())


def run_counted(asked: WhatIf, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, int], int, int]:
    """Run; return the calls of the compiled parts, and the steps that the progress bar expects and sees."""
    calls, steps, metagradient = Counter[str](), [], asked.metagradient

    @contextlib.contextmanager
    def bar(_: str, total: int, **__: str) -> Iterator[SimpleNamespace]:
        steps.append(total)
        yield SimpleNamespace(advance=steps.append)

    def counted(function: CompiledFunction) -> CompiledFunction:
        def call(*arguments: Any) -> Any:
            calls[function.name] += 1
            return function.call(*arguments)

        return dataclasses.replace(function, call=call)

    parts = {name: counted(getattr(metagradient, name)) for name in ("run", "pull_back")}
    monkeypatch.setattr(asked, "metagradient", dataclasses.replace(metagradient, **parts))
    monkeypatch.setattr(what_if, "progress_bar", bar)
    asked.run()
    return calls, steps[0], sum(steps[1:])


def output_means(metagradient: Metagradient, **changes: object) -> np.ndarray:
    """Train the members with changes; return their mean outputs."""
    weights = changed_weights(TRAIN, **changes)
    examples = on_device(TRAIN.images, TRAIN.labels, metagradient.training.mesh, weights)
    values = [metagradient.outputs(metagradient.train(seed_keys(seed), examples))[0] for seed in (0, 1)]
    return np.mean(values, axis=0, dtype=np.float64)


def test_predicted_changes_are_those_of_training_again(asked: WhatIf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convex training is smooth; each member is trained once, and the first one four times more with changes."""
    calls, expected, seen = run_counted(asked, monkeypatch)
    parts = -(-asked.metagradient.training.num_steps // asked.metagradient.steps_per_part)
    assert calls == {"train_part": (2 + 4) * parts, "pull_back": 2 * parts}
    assert seen == expected
    assert asked.smoothness > 0.98

    before = output_means(asked.metagradient)
    for kind in ("remove", "relabel"):
        predicted, real = [], []
        for row in range(0, 100, 10):
            example = asked.influence.iloc[row]
            name = int(example["example_id"])
            changes = {"omit": (name,)} if kind == "remove" else {"relabel": ((name, int(example["proposed_label"])),)}
            predicted.append([example[f"{kind}/{output}"] for output in NAMES])
            real.append(output_means(asked.metagradient, **changes) - before)
        for one, other in zip(np.transpose(predicted), np.transpose(real), strict=True):
            assert np.corrcoef(one, other)[0, 1] > 0.99
            assert np.sum(one * other) / np.sum(one**2) == pytest.approx(1, abs=0.1)


def test_no_derivative_of_a_training_that_is_not_smooth(
    asked: WhatIf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chaotic = copy.copy(asked)
    chaotic.influence = None
    monkeypatch.setattr(what_if, "metasmoothness", lambda *_: 0.89)
    calls, *_ = run_counted(chaotic, monkeypatch)
    assert [*calls] == ["train_part"]
    chaotic.write(tmp_path)
    assert [path.name for path in (tmp_path / "results/what_if").iterdir()] == ["outputs.csv"]


def test_proposed_label_is_the_most_probable_other_class() -> None:
    logits = np.float32([[3, 2, 1], [3, 2, 1], [1, 2, 3]])
    train = dataclasses.replace(TRAIN[:3], labels=np.int32([0, 1, 2]))
    table = what_if.influence_table(train, logits, ["5"], np.zeros((1, 3, 3), np.float32))
    assert table["proposed_label"].tolist() == [1, 0, 1]
    assert list(table) == ["example_id", "label", "proposed_label", "remove/5", "relabel/5"]
    assert logits[0, 0] == 3


def test_outputs_are_means_over_members(asked: WhatIf) -> None:
    each, validation = [params_on_device(MODEL, seed) for seed in CONFIG.seeds], SPLITS["validation"]
    networks = asked.networks
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
    assert "a smooth activation (gelu, silu), a lower learning rate, a larger batch or fewer epochs may help" in words
    assert words.endswith("`what_if` of experiments.yaml")


def test_mistakes_are_chosen_from_the_nearest_to_the_worst() -> None:
    margins = np.array([-1.0, 2.0, -5.0, -0.1, 3.0, -3.0, -4.0, -0.05])
    is_mistake = np.array([1, 0, 1, 1, 0, 1, 1, 0], bool)  # the last one is right, unsurely
    choose = functools.partial(what_if.choose_examples, margins, is_mistake)
    assert choose(3).tolist() == [3, 5, 2]
    assert choose(1).tolist() == [3]
    assert choose(6).tolist() == [7, 3, 0, 5, 6, 2]
