"""The evaluation of the members of a training and of their ensemble, which is served: metrics, tables and figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

from gradtrail.core.data import Split, are_unequal
from gradtrail.core.evaluate import (
    EvaluateConfig,
    Evaluation,
    Logits,
    evaluate_logits,
    fit_temperature,
    log_mean_softmax,
    share_metrics,
)
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.xla.passes import Pass
from gradtrail.stages.common import plotting
from gradtrail.stages.data.parquet import with_class_names
from gradtrail.stages.model.members import over_members
from gradtrail.stages.model.weights import WeightsInfo

COMPARED = (  # metrics that people compare
    *("accuracy", "accuracy_low", "accuracy_high", "accuracy_sd", "accuracy_corrected_labels", "members"),
    *("loss", "expected_calibration_error", "num_mistakes", "ensemble_accuracy", "ensemble_loss", "top_5_accuracy"),
    # Of a test split with unequal classes
    *("balanced_accuracy", "balanced_accuracy_low", "balanced_accuracy_high", "balanced_accuracy_sd"),
    *("ensemble_balanced_accuracy", "ensemble_balanced_accuracy_low", "ensemble_balanced_accuracy_high"),
)
_ENSEMBLE = (
    *("accuracy", "accuracy_low", "accuracy_high", "loss", "brier", "temperature", "f1_macro", "top_5_accuracy"),
    *("balanced_accuracy", "balanced_accuracy_low", "balanced_accuracy_high"),
    *("expected_calibration_error", "expected_calibration_error_uncalibrated"),
)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions of one member."""

    seed: int
    weights: Path  # file with its weights
    epoch: int  # epoch of the weights
    validation: Logits  # float32
    test: Logits


@dataclass(frozen=True, kw_only=True)
class MembersEvaluation:
    """Evaluations on the test split, each calibrated with the temperature fitted on the validation split."""

    predictions: Sequence[Predictions]
    members: Sequence[Evaluation]  # the evaluation of each member, in the same order
    ensemble: Evaluation  # evaluation of the members' mean probabilities; of a single member, its own

    @property
    def by_weights(self) -> dict[Path, Evaluation]:
        """Weights file → evaluation of the member."""
        return {member.weights: result for member, result in zip(self.predictions, self.members, strict=True)}

    def metrics(self, test: Split) -> dict[str, Any]:
        """Return the metrics of a single member, or means and spreads over several and the ensemble's metrics."""
        metrics = over_members(self._rows(test))
        if len(self.members) > 1:
            metrics |= {f"ensemble_{key}": value for key, value in self.ensemble.metrics().items() if key in _ENSEMBLE}
        return metrics

    def table(self, test: Split) -> pd.DataFrame:
        """Return a row of metrics for each member."""
        rows = self._rows(test)
        return pd.DataFrame([{"seed": member.seed, **row} for member, row in zip(self.predictions, rows, strict=True)])

    def agreement(self) -> Float[np.ndarray, " examples"]:
        """Return for each example the share of the members that agree with the ensemble's prediction."""
        agree = [result.predicted == self.ensemble.predicted for result in self.members]
        return np.asarray(np.mean(agree, axis=0, dtype=np.float64), np.float32)

    def _rows(self, test: Split) -> list[dict[str, float]]:
        """Return the metrics of each member; if labels were corrected, with the accuracy by corrected labels."""
        rows = []
        for member, result in zip(self.predictions, self.members, strict=True):
            rows.append({"epoch": member.epoch, **result.metrics()})
            if not np.array_equal(test.labels, test.corrected_labels):
                rows[-1] |= share_metrics("accuracy_corrected_labels", result.predicted == test.corrected_labels)
        return rows


def predict(
    function: Pass,
    members: Iterable[tuple[int, Model, Params, WeightsInfo]],
    paths: Mapping[int, Path],
    splits: tuple[Split, Split],
) -> list[Predictions]:
    """Predict the validation and the test split with every member; one network is in memory at a time.

    Args:
        function: `predict_batch`, compiled for the model of the members.
        members: Seed, model, parameters and metadata of each member, as `read_members` yields them.
        paths: seed → weights file.
    """
    predictions = []
    for seed, _, params, info in members:
        validation, test = (function(params, split.images, split.labels)["logits"] for split in splits)
        predictions.append(
            Predictions(seed=seed, weights=paths[seed], epoch=info.epoch, validation=validation, test=test)
        )
    return predictions


def evaluate(
    predictions: Sequence[Predictions], splits: tuple[Split, Split], config: EvaluateConfig
) -> MembersEvaluation:
    """Evaluate members and their ensemble; `splits` are those for validation and test."""
    fitted_on, tested_on = splits

    def evaluated(validation: Logits, test: Logits) -> Evaluation:
        temperature = fit_temperature(validation, fitted_on.labels)
        bins = config.calibration_bins
        return evaluate_logits(test, tested_on.labels, temperature=temperature, calibration_bins=bins)

    members = [evaluated(member.validation, member.test) for member in predictions]
    ensemble = members[0]
    if len(members) > 1:
        logits = ([member.validation for member in predictions], [member.test for member in predictions])
        ensemble = evaluated(*(log_mean_softmax(np.array(member_logits, np.float64)) for member_logits in logits))
    return MembersEvaluation(predictions=predictions, members=members, ensemble=ensemble)


def write_tables(
    folder: Path, split: Split, evaluation: MembersEvaluation, num_mistakes: int, classes: Sequence[str]
) -> None:
    """Write a split's tables to a new folder; for several members those of the ensemble, and a row for each member.

    `predictions.parquet`: the label, prediction, loss and calibrated class probabilities of every example; of several
    members also the share of them that agree with the prediction.
    `mistakes.csv`: the `num_mistakes` most confident wrong predictions. `classes.csv`: label and prediction of every
    example, for DVC's confusion plot. `calibration.csv` and `calibration_uncalibrated.csv`: the bins of the
    reliability diagram. `per_class.csv`: metrics of each class that has examples. The CSV files have the names of the
    classes.
    """
    folder.mkdir(parents=True)
    result = evaluation.ensemble
    columns = {
        "example_id": split.example_id,
        "label": split.labels,
        "predicted": result.predicted.astype(np.int32),
        "probability": result.probability,
        "loss": result.example_loss,
        **{f"probability_{label}": column for label, column in enumerate(result.probabilities.T)},
    }
    if len(evaluation.members) > 1:
        columns["agreement"] = evaluation.agreement()
        evaluation.table(split).to_csv(folder / "members.csv", index=False, float_format="%.9g")
    predictions = pd.DataFrame(columns)
    predictions.to_parquet(folder / "predictions.parquet", index=False)
    predictions = with_class_names(predictions, classes)
    predictions[["label", "predicted"]].to_csv(folder / "classes.csv", index=False)
    mistake_columns = ["example_id", "label", "predicted", "probability", "loss"]
    mistakes = predictions.loc[result.mistakes[:num_mistakes], mistake_columns]
    tables = {
        "mistakes": mistakes if split.files is None else mistakes.assign(file=split.files[mistakes.index]),
        "calibration": pd.DataFrame(vars(result.reliability)).dropna(),
        "calibration_uncalibrated": pd.DataFrame(vars(result.reliability_uncalibrated)).dropna(),
        "per_class": with_class_names(
            pd.DataFrame(result.per_class).rename_axis("class").reset_index().dropna(subset="recall"), classes
        ),
    }
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def draw_figures(
    folder: Path, evaluation: MembersEvaluation, split: Split, title: str, num_mistakes: int, classes: Sequence[str]
) -> None:
    """Draw the confusion matrix, the reliability diagram, and the worst mistakes, the most certain first."""
    result, num_fitted = evaluation.ensemble, len(evaluation.predictions[0].validation)
    confusion = _draw_confusion(result.confusion, title, classes, by_share=are_unequal(split.labels))
    plotting.save(confusion, folder / "confusion.png")
    plotting.save(_draw_reliability(result, title, num_fitted), folder / "reliability.png")
    worst = result.mistakes[:num_mistakes]
    pairs = [(classes[split.labels[i]], classes[result.predicted[i]], f" ({result.probability[i]:.0%})") for i in worst]
    names = (plotting.name_example(split, i) for i in worst)
    captions = [f"{name}\n{plotting.arrow(*pair)}" for name, pair in zip(names, pairs, strict=True)]
    mistakes = plotting.gallery(split.images[worst], captions, f"Worst mistakes: label → prediction · {title}")
    plotting.save(mistakes, folder / "mistakes.png")


def _draw_confusion(confusion: np.ndarray, title: str, classes: Sequence[str], *, by_share: bool) -> Figure:
    """Draw a confusion matrix; colours show the mistakes alone, as shares of their label if `by_share`."""
    figure, axes = plotting.new_figure(f"Confusion matrix · {title}", size=(6.6, 6.2))
    axis = axes[0, 0]
    mistakes = np.where(np.eye(len(confusion), dtype=bool), 0, confusion)
    if by_share:
        mistakes = mistakes / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    axis.imshow(mistakes, cmap="Oranges")
    for (row, column), count in np.ndenumerate(confusion) if len(confusion) <= plotting.MAX_CLASSES else ():
        shade = plotting.GREY if row == column else "white" if mistakes[row, column] > mistakes.max() / 2 else "black"
        axis.text(column, row, f"{count}" if count else "·", ha="center", va="center", color=shade, fontsize=8)
    axis.set(xlabel="predicted", ylabel="label")
    plotting.name_classes(axis, classes)
    axis.grid(visible=False)
    return figure


def _draw_reliability(result: Evaluation, title: str, num_fitted: int) -> Figure:
    """Draw accuracy over confidence, calibrated and not, and below it the number of examples in each bin."""
    heading = f"Calibration, fitted on {num_fitted:,} validation images"
    figure, axes = plotting.new_figure(f"{heading} · {title}", rows=2, size=(6, 6))
    above, below = axes[:, 0]
    above.plot([0, 1], [0, 1], color=plotting.GREY, linestyle="--", label="perfect")
    kinds = (
        (f"calibrated (temperature {result.temperature:.3g})", result.reliability, plotting.BLUE),
        ("uncalibrated", result.reliability_uncalibrated, plotting.VERMILLION),
    )
    width = 0.9 / len(result.reliability.count)
    for place, (name, bins, colour) in enumerate(kinds):
        error = f"calibration error {bins.expected_calibration_error:.4f}"
        above.plot(bins.confidence, bins.accuracy, color=colour, marker="o", label=f"{name}: {error}")
        left = np.arange(len(bins.count)) / len(bins.count) + place * width / 2
        below.bar(left, bins.count, width / 2, color=colour, align="edge")
    above.set_ylabel("accuracy")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower left", fontsize=9)
    below.set_yscale("log")
    below.set(xlabel="confidence (highest probability)", ylabel="examples", xlim=above.get_xlim())
    return figure
