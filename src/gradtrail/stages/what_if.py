"""What if a training example had not been there? Smoothness of a training, and tables of predicted changes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.gradients.metagradient import Metagradient
from gradtrail.core.gradients.scores import largest
from gradtrail.core.gradients.what_if import SMOOTH, metasmoothness
from gradtrail.core.nn.inference import compile_predict_within, validate
from gradtrail.core.nn.losses import Loss, log_odds
from gradtrail.core.nn.models import HostParams, Model, Params
from gradtrail.core.train.changes import NO_CHANGES, changed_labels, weight_changes
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.keys import keys_of
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.core.xla.passes import Pass
from gradtrail.stages.data.data_files import DatasetInfo
from gradtrail.stages.model.weights import read_members

VALIDATION_LOSS = "validation_loss"  # name of the output that belongs to no test example
_SUBSETS, _SUBSET_SHARE = 2, 0.01  # random subsets by which metasmoothness is measured
TRAININGS = 1 + 2 * _SUBSETS  # number of trainings for metasmoothness

Margins = Callable[[Params | HostParams], Float[np.ndarray, " tests"]]


@dataclass(frozen=True, kw_only=True)
class CompiledMargins:
    """The function from the parameters of a network to its margins of the test examples."""

    predict: Pass
    log_odds: CompiledFunction
    test: Split

    def __call__(self, params: Params | HostParams) -> Float[np.ndarray, " tests"]:
        """Return the margins, in nats."""
        labels = self.test.labels
        return np.asarray(self.log_odds(self.predict(params, self.test.images, labels)["logits"], labels))


def compile_margins(model: Model, test: Split, *, compiler: Compiler) -> CompiledMargins:
    """Compile the predictions of a network and the margins of the test examples."""
    logits = jax.ShapeDtypeStruct((len(test), model.config.num_classes), np.float32)
    return CompiledMargins(
        predict=compile_predict_within(model, compiler=compiler),
        log_odds=compiler.compile("log_odds", log_odds, logits, test.labels),
        test=test,
    )


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Predictions of the trained networks, means over the members."""

    train: Float[np.ndarray, "examples classes"]  # logits
    test: Float[np.ndarray, "tests classes"]  # logits
    margins: Float[np.ndarray, " tests"]  # margins of the test examples, in nats
    validation_loss: float  # in nats
    loss: Loss  # the loss that their training minimized


def predict_members(
    predict: Pass,
    margins: Margins,
    paths: Mapping[int, Path],
    info: DatasetInfo,
    splits: Mapping[str, Split],
) -> Networks:
    """Return the mean predictions of the members, trained on the data set of `info`; `paths` are the files by seed."""
    members = []
    for _, _, params, about in read_members(paths, info):
        minimized, parts = about.loss, (splits[name] for name in ("train", "test"))
        logits = [predict(params, part.images, part.labels)["logits"] for part in parts]
        loss = validate(predict, params, splits["validation"])["loss"]
        members.append((*logits, margins(params), loss))
    train, test, mean_margins, loss = (np.mean(parts, axis=0) for parts in zip(*members, strict=True))
    return Networks(train=train, test=test, margins=mean_margins, validation_loss=float(loss), loss=minimized)


def choose_examples(
    margins: Float[np.ndarray, " tests"], is_mistake: Bool[np.ndarray, " tests"], count: int
) -> Int[np.ndarray, " chosen"]:
    """Return the positions of mistakes, evenly spaced by their margin, from the highest to the lowest one.

    If there are fewer than `count`, return the lowest margins.
    """
    ranked = largest(-margins, len(margins))
    mistakes = ranked[is_mistake[ranked]]
    candidates = (mistakes if len(mistakes) >= count else ranked[:count])[::-1]
    places = np.linspace(0, len(candidates) - 1, min(count, len(candidates)))
    chosen: np.ndarray = candidates[places.round().astype(np.int64)]
    return chosen


def measure_smoothness(
    config: TrainConfig,
    metagradient: Metagradient,
    examples: Examples,
    train: Split,
    margins: Margins,
    advance: Callable[[int], object] = lambda _: None,
) -> float:
    """Return the metasmoothness of the training of the first member, by random subsets of 1 %, at least one example.

    `examples` is `train` on the device, and `margins` are those of all test examples.
    """

    def margins_after(changes: np.ndarray) -> np.ndarray:
        changed = dataclasses.replace(examples, weight_changes=jax.device_put(changes))
        _, states = metagradient.train(keys_of(config.seeds_of(config.seed)), changed)
        advance(metagradient.training.num_steps)
        return margins(states[-1].evaluation_params)

    num_classes = metagradient.training.abstract_examples.weight_changes.shape[1]
    share = max(_SUBSET_SHARE, 1 / len(train))
    subsets = [dataclasses.replace(NO_CHANGES, omit_fraction=share, omit_seed=seed) for seed in range(_SUBSETS)]
    labels = [changed_labels(subset, train.labels, train.example_id, num_classes) for subset in subsets]
    return metasmoothness(margins_after, [weight_changes(train.labels, one, num_classes) for one in labels])


def mean_derivative(
    config: TrainConfig,
    metagradient: Metagradient,
    examples: Examples,
    advance: Callable[[int], object] = lambda _: None,
) -> Float[np.ndarray, "outputs examples classes"]:
    """Return the derivative of the outputs by `Examples.weight_changes`, mean over the members."""
    total: Any = np.float32(0)
    for seed in config.seeds:
        _, derivative = metagradient.derivative(keys_of(config.seeds_of(seed)), examples, advance)
        total = total + derivative / np.float32(config.members)
    if not np.isfinite(total).all():
        raise ConfigError("what_if: train has a derivative that is not finite; a smoother network may help")
    return np.asarray(total)


def output_table(networks: Networks, test: Split, rows: Int[np.ndarray, " chosen"]) -> pd.DataFrame:
    """Return a row for each output: the margins of the test examples at these positions, and the validation loss.

    `output` is the `example_id` or `validation_loss`, `label` and `predicted` are numbers of classes. Values are in
    nats.
    """
    columns = {
        "output": [*map(str, test.example_id[rows]), VALIDATION_LOSS],
        "label": [*test.labels[rows], None],
        "predicted": [*networks.test[rows].argmax(axis=1), None],
        "value": [*networks.margins[rows], networks.validation_loss],
    }
    return pd.DataFrame(columns).astype({"label": "Int32", "predicted": "Int32", "value": "float64"})


def influence_table(
    train: Split,
    logits: Float[np.ndarray, "examples classes"],
    names: Sequence[str],
    derivative: Float[np.ndarray, "outputs examples classes"],
) -> pd.DataFrame:
    """Return a row for each training example: the predicted changes of the outputs with these names.

    `remove/<output>` is the change if the example is removed, `relabel/<output>` if it gets the label `proposed_label`,
    the most probable class other than its label. Labels are numbers of classes.
    """
    rows, candidates = np.arange(len(train)), logits.copy()
    candidates[rows, train.labels] = -np.inf
    proposed = candidates.argmax(axis=1).astype(np.int32)
    remove, add = -derivative[:, rows, train.labels], derivative[:, rows, proposed]
    columns = {"example_id": train.example_id, "label": train.labels, "proposed_label": proposed}
    columns |= {f"remove/{name}": change for name, change in zip(names, remove, strict=True)}
    columns |= {f"relabel/{name}": change for name, change in zip(names, remove + add, strict=True)}
    return pd.DataFrame(columns)


def describe(smoothness: float) -> str:
    """Return a line on what the metasmoothness means for predictions."""
    if smoothness >= SMOOTH:
        meaning = "two equal changes of the training set have about the same effect, so effects can be predicted"
        return f"metasmoothness {smoothness:.2f}, at least {SMOOTH}: {meaning}"
    return (
        f"metasmoothness {smoothness:.2f}, below {SMOOTH}: two equal changes of the training set have different "
        "effects, so effects cannot be predicted and none were written; a smooth activation (gelu, silu), a lower "
        "learning rate, a larger batch or fewer epochs may help"
    )
