"""Labels that look wrong: a ranking of the examples, and how good each score would be where the truth is known.

Per-example scores and what they come to as tables: all of them for later analyses, the telling ones for people.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.common.split import Split
from gradtrail.core.gradients.analysis import FOLLOWED, MEAN, GradientAnalysis, epoch_column
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.gradients.scores import largest, rank_correlation, summarize

SUSPICION = "suspicion"
_LOW_IS_SUSPECT = ("probability", "margin", "mean_probability", "alignment", "class_alignment")
_SINGLE = ("mean_probability", "forgetting_events", "self_influence", "alignment", "class_alignment")  # of no one epoch


def suspicion(table: pd.DataFrame) -> np.ndarray:
    """Return how little the training believed each label, 0 to 1.

    One less the mean probability of the label: over the visits of training for its own examples, over the kept epochs
    for others. A network learns what is regular first (Arpit et al., arXiv 1706.05394), so that the mean over a
    training tells a wrong label better than its end, when the training has come to believe many of them.
    """
    visited = table["mean_probability"].to_numpy(np.float32)
    kept = table[f"probability{MEAN}"].to_numpy(np.float32)
    return 1 - np.where(np.isnan(visited), kept, visited)


def rank_suspects(table: pd.DataFrame, split: str, count: int) -> pd.DataFrame:
    """Return the examples of a split whose labels look wrong, the most suspect first."""
    part = table[table["split"] == split]
    return part.iloc[largest(part[SUSPICION].to_numpy(), count)]


def detection_table(train: pd.DataFrame) -> pd.DataFrame:
    """Return how well each score finds the training labels that noise made wrong; empty where none were.

    Returns:
        A row for each score and epoch: `auroc`; `average_precision`; and among as many suspects as there are wrong
        labels, `precision`; and `false_negative_rate`, the share of the wrong labels that are not among them.
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
    """Yield score, epoch and values of whatever may tell a wrong label."""
    for column in train.columns:
        followed = re.fullmatch(rf"({'|'.join(FOLLOWED)})(?:_epoch_(\d+)|{MEAN})", column)
        if followed:
            epoch = "mean" if followed[2] is None else str(int(followed[2]))
            yield followed[1], epoch, train[column].to_numpy(np.float64)
    for column in _SINGLE:
        yield column, "", train[column].to_numpy(np.float64)


def _detection(is_wrong: np.ndarray, suspect: np.ndarray) -> tuple[float, float, float, float]:
    from sklearn.metrics import (  # late: only noise needs it, and it takes a second
        average_precision_score,
        roc_auc_score,
    )

    found = np.mean(is_wrong[largest(suspect, int(is_wrong.sum()))])
    return roc_auc_score(is_wrong, suspect), average_precision_score(is_wrong, suspect), found, 1 - found


SHOWN = ["split", "example_id", "label", "predicted", "grad_norm", "el2n", "loss", "margin"]
SUSPECT = ["split", "example_id", "label", "predicted", "true_label", "probability", SUSPICION]
SUSPECT_SPLITS = ("train", "test")
STRONGEST = 5  # training examples that are shown on either side of an influence


def score_table(
    splits: Mapping[str, Split], scores: Mapping[str, Mapping[str, np.ndarray]], dynamics: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """Return a row for each example of each split: who it is, and its scores.

    Columns of `dynamics`, which tell of the training split, are NaN elsewhere.
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


_NORM_DECADES = (-6, 2)  # of the norms' histogram, as powers of ten


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All that the scores come to as tables: what is written, drawn and told in words."""

    scores: pd.DataFrame  # every example, of `score_table`
    largest: pd.DataFrame  # those with the largest gradients over all splits, the largest first
    suspects: Mapping[str, pd.DataFrame]  # by split, those whose labels look wrong, the most suspect first
    label_error_scores: pd.DataFrame  # of `detection_table`; empty where no label is known to be wrong
    norms: pd.DataFrame  # of `norm_table`
    noise_scale: pd.DataFrame
    classes: pd.DataFrame
    influence: pd.DataFrame

    @property
    def train(self) -> pd.DataFrame:
        return _of(self.scores, "train")


def make_tables(scores: pd.DataFrame, analysis: GradientAnalysis, config: GradientsConfig) -> Tables:
    """Make all tables of an analysis from the table of all examples."""
    return Tables(
        scores=scores,
        largest=scores.iloc[largest(scores["grad_norm"].to_numpy(), config.num_largest)],
        suspects={name: rank_suspects(scores, name, config.num_suspects) for name in SUSPECT_SPLITS},
        label_error_scores=detection_table(_of(scores, "train")),
        norms=norm_table(scores),
        noise_scale=noise_table(analysis),
        classes=class_table(analysis),
        influence=influence_table(scores, analysis),
    )


def write_tables(folder: Path, tables: Tables) -> None:
    """Write `scores.parquet`, every example, and tables for people, to a new folder."""
    folder.mkdir(parents=True)
    tables.scores.to_parquet(folder / "scores.parquet", index=False)
    small = {
        "largest": tables.largest[SHOWN],
        "suspects": pd.concat([part[SUSPECT] for part in tables.suspects.values()]),
        "label_error_scores": tables.label_error_scores,
        "norms": tables.norms,
        "noise_scale": tables.noise_scale,
        "classes": tables.classes,
        "influence": tables.influence,
    }
    for name, part in small.items():
        if len(part):
            part.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def norm_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Return which share of each split's examples has a gradient of about which norm.

    The bins are the same for all runs, so that they can be laid over each other: quarters of a power of ten,
    `log10_norm` in their middle. What is smaller or larger than all of them counts for the first or the last.
    """
    edges = np.arange(_NORM_DECADES[0], _NORM_DECADES[1] + 1e-9, 0.25)
    table = pd.DataFrame({"log10_norm": edges[:-1] + 0.125})
    for split, part in scores.groupby("split", observed=True):
        norms = np.log10(np.maximum(part["grad_norm"].to_numpy(np.float64), np.finfo(np.float64).tiny))
        inside = np.clip(norms, edges[0], np.nextafter(edges[-1], -np.inf))
        table[str(split)] = np.histogram(inside, edges)[0] / len(part)
    return table


def noise_table(analysis: GradientAnalysis) -> pd.DataFrame:
    """Return the gradient noise scale at each kept epoch."""
    rows = [
        (epoch, found.value, found.low, found.high, found.trace, found.squared_norm)
        for epoch, found in analysis.noise_scales.items()
    ]
    return pd.DataFrame(rows, columns=["epoch", "noise_scale", "low", "high", "trace", "squared_norm"])


def class_table(analysis: GradientAnalysis) -> pd.DataFrame:
    """Return a row for each class: its share, and its cosine and coherence with every class."""
    classes = analysis.classes
    numbers = range(len(classes.share))
    return pd.DataFrame(
        {
            "class": list(numbers),
            "share": classes.share,
            **{f"cosine_{other}": classes.cosine[:, other] for other in numbers},
            **{f"coherence_{other}": classes.coherence[:, other] for other in numbers},
        }
    )


def influence_table(table: pd.DataFrame, analysis: GradientAnalysis) -> pd.DataFrame:
    """Return for each chosen test example the training examples that helped and that hurt it most, in order."""
    train, test = _of(table, "train"), _of(table, "test")
    rows = []
    for column, position in enumerate(analysis.influenced):
        influence = analysis.influence[:, column]
        told = test.iloc[position]
        sides = {"helped": largest(influence, STRONGEST), "hurt": largest(-influence, STRONGEST)}
        for effect, strongest in sides.items():
            for rank, example in enumerate(strongest, start=1):
                by = train.iloc[example]
                names = (told.example_id, told.label, told.predicted, effect, rank, by.example_id, by.label)
                rows.append((*names, float(influence[example])))
    columns = ["test_example", "label", "predicted", "effect", "rank", "train_example", "train_label", "influence"]
    return pd.DataFrame(rows, columns=columns)


def typical_noise_scale(analysis: GradientAnalysis) -> float | None:
    """Return the median over the kept epochs whose mean gradient stands out from its noise; None where none does."""
    known = sorted(found.value for found in analysis.noise_scales.values() if math.isfinite(found.value))
    return known[len(known) // 2] if known else None


def measure(tables: Tables, analysis: GradientAnalysis, config: GradientsConfig) -> dict[str, float]:
    """Return the metrics: the summary of the training split by itself, that of others by split; then the analyses."""
    metrics: dict[str, float] = {"num_examples": len(tables.scores)}
    for split, part in tables.scores.groupby("split", observed=True):
        columns = {name: part[name].to_numpy() for name in part.columns}
        summary = summarize(columns, top_fraction=config.top_fraction)
        prefix = "" if split == "train" else f"{split}_"
        metrics |= {f"{prefix}{name}": value for name, value in summary.items()}
    return metrics | _measure_training(tables, analysis)


def _measure_training(tables: Tables, analysis: GradientAnalysis) -> dict[str, float]:
    """Return the metrics of the analyses of the training split; what is infinite is left out."""
    train = tables.train
    noise = {f"noise_scale_epoch_{epoch:03d}": found.value for epoch, found in analysis.noise_scales.items()}
    if typical := typical_noise_scale(analysis):
        noise["noise_scale_typical"] = typical
    first = epoch_column("grad_norm", min(analysis.noise_scales))
    found = {
        **noise,
        "coherence_within_classes": analysis.classes.within,
        "coherence_across_classes": analysis.classes.across,
        "forgetting_events_mean": float(np.mean(train["forgetting_events"])),
        "never_correct": float(np.mean(train["first_correct_epoch"] == 0)),
        "first_grad_norm_rank_correlation_input_norm": rank_correlation(
            train[first].to_numpy(), train["input_norm"].to_numpy()
        ),
    }
    if analysis.curvature is not None:
        found["hessian_largest_eigenvalue"] = analysis.curvature
    detection = tables.label_error_scores
    chosen = detection[detection["score"] == "mean_probability"]
    if len(chosen):
        names = ("auroc", "average_precision", "precision", "false_negative_rate")
        found |= {f"label_errors_{name}": float(chosen.iloc[0][name]) for name in names}
    return {name: value for name, value in found.items() if np.isfinite(value)}


def _of(table: pd.DataFrame, split: str) -> pd.DataFrame:
    return table[table["split"] == split].reset_index(drop=True)
