"""What if a training example had not been there: predictions of the networks, tables, a figure and a summary."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.gradients.metagradient import Metagradient
from gradtrail.core.gradients.scores import largest
from gradtrail.core.gradients.what_if import SMOOTH, metasmoothness, predict_split, predicted_changes, retrain
from gradtrail.core.nn.models import HostParams, Params
from gradtrail.core.train.changes import NO_CHANGES, weight_changes
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.keys import keys_of
from gradtrail.stages.artifacts import plotting

VALIDATION_LOSS = "validation_loss"  # name of the output that belongs to no test example
_SUBSETS, _SUBSET_SHARE = 2, 0.01  # random subsets by which metasmoothness is measured
TRAININGS = 1 + 2 * _SUBSETS  # number of trainings that it takes
_LARGEST_SHARE = 0.001  # share of the training examples whose influences are summed up as the largest ones
_STRONGEST, _LISTED = 5, 3  # training examples for each sign, in the figure and in the summary
_PANELS = 4  # test examples in the figure

Predict = Callable[..., dict[str, Array]]  # see `compile_predict`
Predictions = Mapping[str, np.ndarray]  # `margin`, `loss` and `probabilities` of each example
Advance = Callable[[int], object]  # called with a number of steps


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The outputs of the trained networks whose changes are predicted: margins of test examples, validation loss."""

    test: Split  # the test examples
    predicted: Int[np.ndarray, " tests"]  # most probable class of each, int32
    margins: Float[np.ndarray, " tests"]  # in nats
    validation_loss: float  # mean over the validation split, in nats

    @property
    def names(self) -> list[str]:
        """The name of each output: the `example_id` of a test example, or `validation_loss`."""
        return [*map(str, self.test.example_id), VALIDATION_LOSS]

    def table(self) -> pd.DataFrame:
        """Return a row for each output; label and prediction are numbers of classes, missing for the loss."""
        columns = {
            "output": self.names,
            "label": [*self.test.labels, None],
            "predicted": [*self.predicted, None],
            "value": [*self.margins, self.validation_loss],
        }
        return pd.DataFrame(columns).astype({"label": "Int32", "predicted": "Int32", "value": "float64"})


def require_unchanged(config: TrainConfig) -> None:
    """Raise ConfigError, one line, if the training leaves out or relabels examples."""
    if config.changes.enabled:
        raise ConfigError(f"what_if: train.changes must be empty, as its effects are to be predicted, got {config.changes}")


def mean_predictions(
    predict: Predict, networks: Iterable[Params | HostParams], splits: Mapping[str, Split]
) -> dict[str, Predictions]:
    """Return the predictions for each split, means over the networks, of which one is in memory at a time."""
    of_networks = [
        {name: predict_split(predict, params, split) for name, split in splits.items()} for params in networks
    ]
    return {
        name: {key: np.mean([one[name][key] for one in of_networks], axis=0) for key in of_networks[0][name]}
        for name in splits
    }


def outputs_of(splits: Mapping[str, Split], predictions: Mapping[str, Predictions], rows: np.ndarray) -> Outputs:
    """Return the outputs for the test examples at these positions."""
    test = predictions["test"]
    return Outputs(
        test=splits["test"][rows],
        predicted=test["probabilities"][rows].argmax(axis=1).astype(np.int32),
        margins=test["margin"][rows],
        validation_loss=float(np.mean(predictions["validation"]["loss"], dtype=np.float64)),
    )


def proposed_labels(train: Split, predictions: Predictions) -> Int[np.ndarray, " examples"]:
    """Return the most probable class of each training example other than its label, int32."""
    probabilities = predictions["probabilities"].copy()
    probabilities[np.arange(len(train)), train.labels] = -1
    return probabilities.argmax(axis=1).astype(np.int32)


def measure_smoothness(
    config: TrainConfig,
    metagradient: Metagradient,
    examples: Examples,
    splits: Mapping[str, Split],
    predict: Predict,
    *,
    advance: Advance,
) -> float:
    """Return the metasmoothness of the training of the first member, by random subsets of 1 %.

    Args:
        examples: the training split on the device, without changes.
        advance: called with the number of steps after each training.
    """
    train, num_classes = splits["train"], examples.weight_changes.shape[1]

    def margins_after(changes: np.ndarray) -> np.ndarray:
        params = retrain(metagradient, keys_of(config.seeds_of(config.seed)), examples, changes)
        advance(metagradient.program.num_steps)
        return predict_split(predict, params, splits["test"])["margin"]

    subsets = [dataclasses.replace(NO_CHANGES, omit_fraction=_SUBSET_SHARE, omit_seed=seed) for seed in range(_SUBSETS)]
    changes = [weight_changes(subset, train.labels, train.example_id, num_classes) for subset in subsets]
    return metasmoothness(margins_after, changes)


def mean_derivative(
    config: TrainConfig, metagradient: Metagradient, examples: Examples, *, advance: Advance
) -> Float[np.ndarray, "outputs examples classes"]:
    """Return the derivative of the outputs by `Examples.weight_changes`, mean over the members."""
    total = np.float32(0)
    for seed in config.seeds:
        total = total + metagradient.derivative(keys_of(config.seeds_of(seed)), examples, advance)[1]
    return total / np.float32(config.members)


def influence_table(
    train: Split, proposed: Int[np.ndarray, " examples"], names: Sequence[str], derivative: np.ndarray
) -> pd.DataFrame:
    """Return a row for each training example.

    `remove/<output>` is the predicted change of an output, in nats, if the example is removed, and `relabel/<output>`
    if it gets its `proposed_label`. Labels are numbers of classes.
    """
    columns = {"example_id": train.example_id, "label": train.labels, "proposed_label": proposed}
    for kind, changes in predicted_changes(derivative, train.labels, proposed).items():
        columns |= {f"{kind}/{name}": change for name, change in zip(names, changes, strict=True)}
    return pd.DataFrame(columns)


def held_by_largest(influence: pd.DataFrame, names: Sequence[str]) -> float:
    """Return the share of the sum of |remove| that the largest 0.1 % of the examples hold, mean over the outputs."""
    count = max(1, round(_LARGEST_SHARE * len(influence)))
    sizes = [np.sort(np.abs(influence[f"remove/{name}"].to_numpy(np.float64)))[::-1] for name in names]
    return float(np.mean([size[:count].sum() / max(size.sum(), np.finfo(np.float64).tiny) for size in sizes]))


def what_if_metrics(smoothness: float, outputs: Outputs, influence: pd.DataFrame | None) -> dict[str, float]:
    """Return the metrics of the stage, flat."""
    held = {} if influence is None else {"influence_held_by_largest": held_by_largest(influence, outputs.names)}
    return {"metasmoothness": smoothness, "outputs": len(outputs.names), "loss": outputs.validation_loss, **held}


def draw(influence: pd.DataFrame, outputs: Outputs, train: Split, classes: Sequence[str], title: str) -> Figure:
    """Draw test examples in a row each, with the training examples whose removal lowers or raises the margin most."""
    images, captions = [], []
    for row, name in enumerate(outputs.names[:-1][:_PANELS]):
        pair = classes[outputs.test.labels[row]], classes[outputs.predicted[row]]
        images.append(outputs.test.images[row])
        captions.append(f"test #{name}\n{plotting.arrow(*pair, f'  {outputs.margins[row]:+.1f}')}")
        changes = influence[f"remove/{name}"].to_numpy()
        for example in [*largest(-changes, _STRONGEST), *largest(changes, _STRONGEST)]:
            images.append(train.images[example])
            label = plotting.short(classes[train.labels[example]])
            captions.append(f"#{train.example_id[example]}\n{label}  {changes[example]:+.2g}")
    columns = len(images) // min(_PANELS, len(outputs.test))
    heading = (
        f"What if a training example had not been there? · {title} · Test examples: label → prediction and margin in "
        "nats; then the removals that would lower the margin most, and those that would raise it most"
    )
    return plotting.gallery(np.stack(images), captions, heading, columns=columns)


def describe_smoothness(smoothness: float) -> str:
    """Return a sentence on what the metasmoothness means for predictions; it begins in lower case."""
    if smoothness >= SMOOTH:
        return (
            f"metasmoothness is {smoothness:.2f}, at least {SMOOTH}: effects are nearly proportional to small changes of "
            "the training set, so they can be predicted"
        )
    return (
        f"metasmoothness is {smoothness:.2f}, below {SMOOTH}: two equal changes of the training set have different "
        "effects, so they cannot be predicted and no influences were written; a smooth activation (such as "
        "train.mlp.activation=gelu), a lower learning rate, a larger batch or fewer epochs would help"
    )


def summarize(
    title: str, smoothness: float, outputs: Outputs, influence: pd.DataFrame | None, classes: Sequence[str]
) -> str:
    """Return the summary in Markdown; `influence` is None if the training is not smooth."""
    sentence = describe_smoothness(smoothness)
    parts = [f"# What if a training example had not been there: {title}", f"{sentence[0].upper()}{sentence[1:]}."]
    if influence is not None:
        share = held_by_largest(influence, outputs.names)
        parts.append(
            f"For each output, the {_LARGEST_SHARE:.1%} of the training examples with the largest predicted effects hold "
            f"{share:.0%} of the sum of all. `gradtrail what-if` checks predictions by training again."
        )
        lines = ["| output | label | predicted | value | removals that lower it | removals that raise it |", "| - " * 6 + "|"]
        for row in outputs.table().itertuples(index=False):
            pair = ["" if pd.isna(number) else classes[number] for number in (row.label, row.predicted)]
            changes = influence[f"remove/{row.output}"].to_numpy()
            sides = [
                ", ".join(
                    f"#{influence['example_id'][place]} ({classes[influence['label'][place]]}) {changes[place]:+.2g}"
                    for place in largest(sign * changes, _LISTED)
                )
                for sign in (-1, 1)
            ]
            lines.append(f"| {' | '.join([row.output, *pair, f'{row.value:.4g}', *sides])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write(
    folder: Path,
    smoothness: float,
    outputs: Outputs,
    influence: pd.DataFrame | None,
    train: Split,
    classes: Sequence[str],
    title: str,
) -> None:
    """Write `outputs.csv` and `summary.md` to a new folder, and `influence.parquet` and `what_if.png` if predicted.

    Args:
        influence: None if the training is not smooth.
        classes: name of each class.
        title: model and data set.
    """
    folder.mkdir(parents=True)
    outputs.table().to_csv(folder / "outputs.csv", index=False, float_format="%.9g")
    (folder / "summary.md").write_text(summarize(title, smoothness, outputs, influence, classes), encoding="utf-8")
    if influence is not None:
        influence.to_parquet(folder / "influence.parquet", index=False)
        plotting.save(draw(influence, outputs, train, classes, title), folder / "what_if.png")
