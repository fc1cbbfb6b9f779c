"""Tables and metrics of a gradient analysis: the scores of every example, and small tables for people and plots.

Suspected label errors are examples whose labels got little probability over the training. Where label noise was
injected, the true labels are known, and a table says how well each score finds the wrong ones.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.data import Split
from gradtrail.core.gradients.analysis import EPOCH_SCORES, MEAN, GradientAnalysis, epoch_column
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.gradients.exact import ERROR
from gradtrail.core.gradients.scores import largest, rank_correlation, summarize

SUSPICION = "suspicion"
_LOW_IS_SUSPECT = ("probability", "margin", "mean_probability", "alignment", "class_alignment")
_SINGLE = ("mean_probability", "forgetting_events", "self_influence", "alignment", "class_alignment")  # of no one epoch
SHOWN = ["split", "example_id", "label", "predicted", "grad_norm", "el2n", "loss", "margin"]
SUSPECT = ["split", "example_id", "label", "predicted", "true_label", "probability", SUSPICION]
SUSPECT_SPLITS = ("train", "test")
STRONGEST = 5  # training examples that are listed for each sign of the influence
_MEDIAN = "grad_norm_median"
_TRAINING_TABLES = ("noise_scale", "classes", "influence")  # tables
_NORM_DECADES = (-6, 2)  # of the histogram of norms, as powers of ten


def suspicion(table: pd.DataFrame) -> np.ndarray:
    """Return the suspicion of each label, 0 to 1: one minus the mean probability of the label over the training.

    The mean is over the epochs of training for training examples, and over the kept epochs for others. A network learns
    regular patterns first (Arpit et al., arXiv 1706.05394), so the mean over a training detects a wrong label better
    than the final probability, when many wrong labels have been memorized.
    """
    visited = table["mean_probability"].to_numpy(np.float32)
    mean_probability = table[f"probability{MEAN}"].to_numpy(np.float32)
    return 1 - np.where(np.isnan(visited), mean_probability, visited)


def rank_suspects(table: pd.DataFrame, split: str, count: int) -> pd.DataFrame:
    """Return the `count` examples of a split with the highest suspicion, the highest first."""
    part = table[table["split"] == split]
    return part.iloc[largest(part[SUSPICION].to_numpy(), count)]


def detection_table(train: pd.DataFrame) -> pd.DataFrame:
    """Return how well each score finds the training labels that label noise changed.

    Returns:
        A row for each score and epoch, the best first: `auroc` and `average_precision`; and with as many suspects as
        there are wrong labels, `precision` and `false_negative_rate`, the share of wrong labels that are not among the
        suspects. No rows if no label is wrong, or all are.
    """
    is_wrong = (train["label"] != train["true_label"]).to_numpy()
    columns = ["score", "epoch", "auroc", "average_precision", "precision", "false_negative_rate"]
    if not is_wrong.any() or is_wrong.all():
        return pd.DataFrame(columns=columns)
    rows = [
        (name, epoch, *_detection(is_wrong, -values if name in _LOW_IS_SUSPECT else values))
        for name, epoch, values in _candidates(train)
    ]
    return pd.DataFrame(rows, columns=columns).sort_values("average_precision", ascending=False, ignore_index=True)


def _candidates(train: pd.DataFrame) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the name, epoch and values of each score that may indicate a wrong label."""
    for column in train.columns:
        followed = re.fullmatch(rf"({'|'.join(EPOCH_SCORES)})(?:_epoch_(\d+)|{MEAN})", column)
        if followed:
            epoch = "mean" if followed[2] is None else str(int(followed[2]))
            yield followed[1], epoch, train[column].to_numpy(np.float64)
    for column in _SINGLE:
        yield column, "", train[column].to_numpy(np.float64)


def _detection(is_wrong: np.ndarray, suspect: np.ndarray) -> tuple[float, float, float, float]:
    from sklearn.metrics import (  # late: the import takes a second, and only label noise needs it
        average_precision_score,
        roc_auc_score,
    )

    recall = np.mean(is_wrong[largest(suspect, int(is_wrong.sum()))])
    return roc_auc_score(is_wrong, suspect), average_precision_score(is_wrong, suspect), recall, 1 - recall


def score_table(
    splits: Mapping[str, Split], scores: Mapping[str, Mapping[str, np.ndarray]], dynamics: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """Return a row for each example of each split: its id, its labels and its scores.

    The columns of `dynamics`, which are about the training split, are NaN for the other splits.
    """
    names = list(splits)
    parts = [
        pd.DataFrame(
            {
                "split": pd.Categorical([name] * len(split), categories=names),
                "example_id": split.example_id,
                "label": split.labels,
                "true_label": split.true_labels,
                **scores[name],
                "correct": scores[name]["predicted"] == split.labels,
                **{key: values if name == "train" else np.nan for key, values in dynamics.items()},
            }
        ).astype(dict.fromkeys(dynamics, np.float32))
        for name, split in splits.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    return table.assign(**{SUSPICION: suspicion(table)})


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All tables of the stage, for files, figures and the summary."""

    scores: pd.DataFrame  # scores of every example, see `score_table`
    largest: pd.DataFrame  # examples with the largest gradients over all splits, the largest first
    suspects: Mapping[str, pd.DataFrame]  # split → its suspected label errors, the most suspect first
    label_error_scores: pd.DataFrame  # scores as detectors of wrong labels; empty if no label is known to be wrong
    splits: pd.DataFrame
    norms: pd.DataFrame
    noise_scale: pd.DataFrame
    classes: pd.DataFrame
    influence: pd.DataFrame

    @property
    def train(self) -> pd.DataFrame:
        return _of(self.scores, "train")

    @property
    def has_training_rows(self) -> bool:
        """Whether there are training examples: a private training to publish shows none."""
        return bool((self.scores["split"] == "train").any())


def make_tables(scores: pd.DataFrame, analysis: GradientAnalysis, config: GradientsConfig) -> Tables:
    """Make all tables of an analysis from the table of all examples."""
    return Tables(
        scores=scores,
        largest=scores.iloc[largest(scores["grad_norm"].to_numpy(), config.num_largest)],
        suspects={name: rank_suspects(scores, name, config.num_suspects) for name in SUSPECT_SPLITS},
        label_error_scores=detection_table(_of(scores, "train")),
        splits=split_table(scores, config),
        norms=norm_table(scores),
        noise_scale=noise_table(analysis),
        classes=class_table(analysis),
        influence=influence_table(scores, analysis),
    )


def write_tables(folder: Path, tables: Tables, errors: Mapping[str, float]) -> None:
    """Write `scores.parquet`, with every example, and the other tables that have rows, as CSV, to a new folder.

    `float64_errors.csv` has the errors of `float64_errors`. Without training examples, tables about them have no rows.
    """
    folder.mkdir(parents=True)
    tables.scores.to_parquet(folder / "scores.parquet", index=False)
    small = {
        "largest": tables.largest[SHOWN],
        "suspects": pd.concat([part[SUSPECT] for part in tables.suspects.values()]),
        "label_error_scores": tables.label_error_scores,
        "splits": tables.splits,
        "norms": tables.norms,
        "noise_scale": tables.noise_scale,
        "classes": tables.classes,
        "influence": tables.influence,
        "float64_errors": error_table(errors),
    }
    for name, part in small.items():
        if len(part) or (name in _TRAINING_TABLES and not tables.has_training_rows):
            part.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def norm_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Return a histogram of the gradient norm: the share of each split's examples in each bin.

    The bins are the same in all runs, so that runs can be compared: a quarter of a power of ten each, with
    `log10_norm` in the middle. Norms outside of all bins are counted in the first or the last.
    """
    edges = np.arange(_NORM_DECADES[0], _NORM_DECADES[1] + 1e-9, 0.25)
    table = pd.DataFrame({"log10_norm": edges[:-1] + 0.125})
    for split, part in scores.groupby("split", observed=True):
        norms = np.log10(np.maximum(part["grad_norm"].to_numpy(np.float64), np.finfo(np.float64).tiny))
        inside = np.clip(norms, edges[0], np.nextafter(edges[-1], -np.inf))
        table[str(split)] = np.histogram(inside, edges)[0] / len(part)
    if "train" not in table:  # of a private training to publish
        table.insert(1, "train", np.nan)
    return table


def noise_table(analysis: GradientAnalysis) -> pd.DataFrame:
    """Return a row for each epoch of the analysis: its gradient noise scale, with interval, tr(Σ) and ‖G‖²."""
    rows = [
        (epoch, noise_scale.value, noise_scale.low, noise_scale.high, noise_scale.trace, noise_scale.squared_norm)
        for epoch, noise_scale in analysis.noise_scales.items()
    ]
    return pd.DataFrame(rows, columns=["epoch", "noise_scale", "low", "high", "trace", "squared_norm"])


def class_table(analysis: GradientAnalysis) -> pd.DataFrame:
    """Return a row for each class: share of a step's decrease in loss, cosine and coherence with every class.

    No rows if there are no training examples.
    """
    classes = analysis.classes
    numbers = range(len(classes.share))
    table = pd.DataFrame(
        {
            "class": list(numbers),
            "share": classes.share,
            **{f"cosine_{other}": classes.cosine[:, other] for other in numbers},
            **{f"coherence_{other}": classes.coherence[:, other] for other in numbers},
        }
    )
    return table if analysis.noise_scales else table[:0]


def influence_table(table: pd.DataFrame, analysis: GradientAnalysis) -> pd.DataFrame:
    """Return, for each chosen test example, the training examples that helped or hurt it most, strongest first."""
    train, test = _of(table, "train"), _of(table, "test")
    rows: list[tuple] = []
    for column, position in enumerate(analysis.influenced):
        influence = analysis.influence[:, column]
        test_row = test.iloc[position]
        sides = {"helped": largest(influence, STRONGEST), "hurt": largest(-influence, STRONGEST)}
        for effect, strongest in sides.items():
            for rank, example in enumerate(strongest, start=1):
                by = train.iloc[example]
                names = (test_row.example_id, test_row.label, test_row.predicted, effect, rank, by.example_id, by.label)
                rows.append((*names, float(influence[example])))
    columns = ["test_example", "label", "predicted", "effect", "rank", "train_example", "train_label", "influence"]
    return pd.DataFrame(rows, columns=columns)


def typical_noise_scale(analysis: GradientAnalysis) -> float | None:
    """Return the (upper) median of the finite noise scales; None if none is finite."""
    finite = sorted(
        noise_scale.value for noise_scale in analysis.noise_scales.values() if math.isfinite(noise_scale.value)
    )
    return finite[len(finite) // 2] if finite else None


def split_table(scores: pd.DataFrame, config: GradientsConfig) -> pd.DataFrame:
    """Return a row for each split: norms and their correlations, see `summarize`."""
    parts = {str(split): part for split, part in scores.groupby("split", observed=True)}
    rows = [
        {"split": split}
        | summarize({name: part[name].to_numpy() for name in part.columns}, top_fraction=config.top_fraction)
        for split, part in parts.items()
    ]
    return pd.DataFrame(rows)


def error_table(errors: Mapping[str, float]) -> pd.DataFrame:
    """Return the largest error of each score in the sample, from the float64 score; see `float64_errors`."""
    rows = [(name.removeprefix(ERROR), value) for name, value in errors.items()]
    return pd.DataFrame(rows, columns=["score", "largest_sampled_error_over_value_or_rms"])


def measure(tables: Tables, analysis: GradientAnalysis) -> dict[str, float]:
    """Return the metrics: the summary of the training split, the median norms of the others, and those of the analyses.

    Without training examples, metrics about them are left out.
    """
    splits = {str(row.pop("split")): row for row in tables.splits.to_dict("records")}
    medians = {f"{split}_{_MEDIAN}": row[_MEDIAN] for split, row in splits.items() if split != "train"}
    metrics = {"num_examples": len(tables.scores)}
    if not tables.has_training_rows:
        return metrics | medians
    train = {str(name): value for name, value in splits["train"].items()}
    return metrics | train | medians | _measure_training(tables, analysis)


def _measure_training(tables: Tables, analysis: GradientAnalysis) -> dict[str, float]:
    """Return the metrics of the analyses of the training split; infinite ones are left out."""
    train = tables.train
    typical = typical_noise_scale(analysis)
    first = epoch_column("grad_norm", min(analysis.noise_scales))
    metrics = {
        **({} if typical is None else {"noise_scale_typical": typical}),
        "coherence_within_classes": analysis.classes.within,
        "coherence_across_classes": analysis.classes.across,
        "forgetting_events_mean": float(np.mean(train["forgetting_events"])),
        "never_correct": float(np.mean(train["first_correct_epoch"] == 0)),
        "first_grad_norm_rank_correlation_input_norm": rank_correlation(
            train[first].to_numpy(), train["input_norm"].to_numpy()
        ),
    }
    if analysis.curvature is not None:
        metrics["hessian_largest_eigenvalue"] = analysis.curvature
    detection = tables.label_error_scores
    chosen = detection[detection["score"] == "mean_probability"]
    if len(chosen):
        names = ("auroc", "average_precision", "precision", "false_negative_rate")
        metrics |= {f"label_errors_{name}": float(chosen.iloc[0][name]) for name in names}
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def _of(table: pd.DataFrame, split: str) -> pd.DataFrame:
    return table[table["split"] == split].reset_index(drop=True)
