"""What if a training example had not been there? Smoothness of a training, tables, a figure and a summary."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.gradients.metagradient import Metagradient
from gradtrail.core.gradients.scores import largest
from gradtrail.core.gradients.what_if import SMOOTH, metasmoothness
from gradtrail.core.nn.inference import VALIDATION_BATCH_SIZE, predict_logits, validate
from gradtrail.core.nn.models import HostParams, Params
from gradtrail.core.train.changes import NO_CHANGES, weight_changes
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.keys import keys_of
from gradtrail.core.xla.compiler import CompiledFunction
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.artifacts.data_files import DatasetInfo
from gradtrail.stages.artifacts.weights import read_members

VALIDATION_LOSS = "validation_loss"  # name of the output that belongs to no test example
_SUBSETS, _SUBSET_SHARE = 2, 0.01  # random subsets by which metasmoothness is measured
TRAININGS = 1 + 2 * _SUBSETS  # number of trainings for metasmoothness
_LARGEST_SHARE = 0.001  # share of the training examples whose effects are summed up as the largest
_PANELS, _STRONGEST = 4, 5  # test examples in the figure, and training examples of each sign


Margins = Callable[[Params | HostParams], Float[np.ndarray, " tests"]]


def require_unchanged(config: TrainConfig) -> None:
    """Raise ConfigError, one line, if the training leaves out or relabels examples."""
    if config.changes.enabled:
        raise ConfigError(
            f"what_if: train.changes must be empty, as effects of changes are predicted; got {config.changes}"
        )


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Predictions of the trained networks, means over the members."""

    train: Float[np.ndarray, "examples classes"]  # logits
    test: Float[np.ndarray, "tests classes"]  # logits
    margins: Float[np.ndarray, " tests"]  # margins of the test examples, in nats
    validation_loss: float  # in nats


def predict_members(
    predict: CompiledFunction,
    margins: Margins,
    paths: Mapping[int, Path],
    info: DatasetInfo,
    splits: Mapping[str, Split],
) -> Networks:
    """Predict with each member in turn.

    Args:
        predict: function of `compile_predict`.
        margins: parameters → margins of the test examples.
        paths: seed → weights file.
        info: data set that the members must have been trained on.
    """
    members = []
    for _, _, params, _ in read_members(paths, info):
        call, validation = functools.partial(predict, params), splits["validation"]
        logits = [predict_logits(call, VALIDATION_BATCH_SIZE, splits[name]) for name in ("train", "test")]
        loss = validate(predict, params, validation.images, validation.labels)["loss"]
        members.append((*logits, margins(params), loss))
    train, test, mean_margins, loss = (np.mean(parts, axis=0) for parts in zip(*members, strict=True))
    return Networks(train=train, test=test, margins=mean_margins, validation_loss=float(loss))


def choose_examples(networks: Networks, labels: Int[np.ndarray, " tests"], count: int) -> Int[np.ndarray, " chosen"]:
    """Return the positions of mistakes, evenly spaced by their margin, from the highest to the lowest one.

    If there are fewer than `count`, return the lowest margins.
    """
    ranked = largest(-networks.margins, len(labels))
    mistakes = ranked[(networks.test.argmax(axis=1) != labels)[ranked]]
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
    """Return the metasmoothness of the training of the first member, by random subsets of 1 %.

    Args:
        examples: `train` on the device.
        margins: parameters → margins of all test examples.
        advance: called with the number of steps after each training.
    """

    def margins_after(changes: np.ndarray) -> np.ndarray:
        changed = dataclasses.replace(examples, weight_changes=jax.device_put(changes))
        _, states = metagradient.train(keys_of(config.seeds_of(config.seed)), changed)
        advance(metagradient.program.num_steps)
        return margins(metagradient.program.evaluation_params(states[-1]))

    num_classes = metagradient.program.examples.weight_changes.shape[1]
    subsets = [dataclasses.replace(NO_CHANGES, omit_fraction=_SUBSET_SHARE, omit_seed=seed) for seed in range(_SUBSETS)]
    changes: list[Any] = [weight_changes(one, train.labels, train.example_id, num_classes) for one in subsets]
    return metasmoothness(margins_after, changes)


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


def measure(smoothness: float, outputs: pd.DataFrame, influence: pd.DataFrame | None) -> dict[str, float]:
    """Return the metrics of the stage; `influence` is None if the training is not smooth.

    `effects_held_by_largest`: share of the sum of |remove| over the training examples that the largest 0.1 % of them
    hold, mean over the outputs.
    """
    metrics: dict[str, float] = {"metasmoothness": smoothness, "outputs": len(outputs)}
    if influence is not None:
        sizes = np.sort(np.abs(influence.filter(like="remove/").to_numpy(np.float64)), axis=0)[::-1]
        count = max(1, round(_LARGEST_SHARE * len(sizes)))
        metrics["effects_held_by_largest"] = float(np.mean(sizes[:count].sum(axis=0) / sizes.sum(axis=0)))
    return metrics


def describe(smoothness: float) -> str:
    """Return a line on what the metasmoothness means for predictions."""
    if smoothness >= SMOOTH:
        meaning = "two equal changes of the training set have about the same effect, so effects can be predicted"
        return f"metasmoothness {smoothness:.2f}, at least {SMOOTH}: {meaning}"
    return (
        f"metasmoothness {smoothness:.2f}, below {SMOOTH}: two equal changes of the training set have different "
        "effects, so effects cannot be predicted and no ranking was written; train.mlp.activation=gelu, a lower "
        "learning rate, a larger batch or fewer epochs may help"
    )


def draw(
    influence: pd.DataFrame, outputs: pd.DataFrame, test: Split, train: Split, classes: Sequence[str], title: str
) -> Figure:
    """Draw each test example in a row, with the training examples whose removal lowers or raises its margin most."""
    images, captions = [], []
    for row in range(min(_PANELS, len(test))):
        name, label, predicted, margin = outputs.iloc[row]
        images.append(test.images[row])
        captions.append(f"test #{name}\n{plotting.arrow(classes[label], classes[predicted], f'  {margin:+.1f}')}")
        changes = influence[f"remove/{name}"].to_numpy()
        for example in [*largest(-changes, _STRONGEST), *largest(changes, _STRONGEST)]:
            images.append(train.images[example])
            label = plotting.short(classes[train.labels[example]])
            captions.append(f"#{train.example_id[example]}\n{label}  {changes[example]:+.2g}")
    heading = (
        f"What if a training example had not been there? · {title} · Test examples, label → prediction and margin in "
        "nats; removals that would lower the margin most; removals that would raise it most"
    )
    return plotting.gallery(np.stack(images), captions, heading, columns=1 + 2 * min(_STRONGEST, len(train)))


def write(
    folder: Path,
    title: str,
    smoothness: float,
    outputs: pd.DataFrame,
    influence: pd.DataFrame | None,
    figure: Figure | None,
) -> None:
    """Write `outputs.csv` and `summary.md` to a new folder; if predicted also `influence.parquet` and `what_if.png`."""
    folder.mkdir(parents=True)
    outputs.to_csv(folder / "outputs.csv", index=False, float_format="%.9g")
    lines = [f"# What if a training example had not been there? {title}", "", f"{describe(smoothness).capitalize()}."]
    if influence is not None and figure is not None:
        influence.to_parquet(folder / "influence.parquet", index=False)
        plotting.save(figure, folder / "what_if.png")
        lines += ["", "The removal that would change each output most; `gradtrail what-if` trains again to check:", ""]
        for name, value in zip(outputs["output"], outputs["value"], strict=True):
            changes = influence[f"remove/{name}"]
            row = int(np.argmax(np.abs(changes)))
            lines.append(f"- {name}: {value:.3g}; {changes[row]:+.2g} without #{influence['example_id'][row]}")
    (folder / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
