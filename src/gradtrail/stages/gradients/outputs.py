"""Tables and metrics of the gradient analyses of all members, for files, figures and the summary.

Suspected label errors are examples whose labels got little probability over the training. Where label noise was
injected, the true labels are known, and a table says how well each score finds the wrong ones.
"""

import dataclasses
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from gradtrail.core.data import Split
from gradtrail.core.gradients.analysis import (
    EPOCH_SCORES,
    MEAN,
    GradientAnalysis,
    GradientsConfig,
    analyze,
    epoch_column,
    num_visits,
)
from gradtrail.core.gradients.passes import GradientPasses
from gradtrail.core.gradients.scores import largest, rank_correlation, summarize
from gradtrail.stages.data.parquet import with_class_names
from gradtrail.stages.gradients.inputs import MemberInputs, Rows, take_train
from gradtrail.stages.model.members import FOLDER, over_members
from gradtrail.support.progress import progress_bar

COMPARED = (  # metrics that people compare
    *("grad_norm_median", "validation_grad_norm_median", "noise_scale_typical", "coherence_within_classes"),
    *("label_errors_auroc", "members"),
)
SCORES = "scores.parquet"
SUSPICION = "suspicion"
SUSPECT_SPLITS = ("train", "test")
STANDARD_ERROR = "_se"  # suffix of a score: the standard error of its mean over several members
WITH_ERROR = (
    *("grad_norm", "el2n", "loss", "margin", "probability", "alignment", "class_alignment"),
    *("mean_probability", SUSPICION),
)
_IDENTITY = ["split", "example_id", "label", "true_label"]
_SHOWN = ["split", "example_id", "label", "predicted", "grad_norm", "el2n", "loss", "margin"]
_SUSPECT = ["split", "example_id", "label", "predicted", "true_label", "probability", SUSPICION]
_DETECTION = ["score", "epoch", "auroc", "average_precision", "precision", "false_negative_rate"]
_NOISE_SCALE = ["epoch", "noise_scale", "low", "high", "trace", "squared_norm", "sharpness"]
_LOW_IS_SUSPECT = ("probability", "margin", "mean_probability", "alignment", "class_alignment")
_SINGLE = ("mean_probability", "forgetting_events", "alignment", "class_alignment")  # of no one epoch
_NORM_DECADES = (-6, 2)  # range of the histogram of norms, as powers of ten


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All tables of the stage; each but `scores` becomes a CSV file of its name."""

    scores: pd.DataFrame  # scores of every example, see `score_table`
    largest: pd.DataFrame  # examples with the largest gradients over all splits, the largest first
    suspects: pd.DataFrame  # suspected label errors of `SUSPECT_SPLITS`, the most suspect of each split first
    label_error_scores: pd.DataFrame  # scores as detectors of wrong labels; empty if no label is known to be wrong
    splits: pd.DataFrame  # norms of each split and their correlations, see `summarize`
    norms: pd.DataFrame  # histogram of the gradient norm
    noise_scale: pd.DataFrame  # gradient noise scale of each kept epoch, and sharpness
    classes: pd.DataFrame  # similarity of the classes' gradients

    @property
    def train(self) -> pd.DataFrame:
        return _rows_of(self.scores, "train")

    @property
    def has_training_rows(self) -> bool:
        """Whether there are training examples: a private training to publish shows none."""
        return bool((self.scores["split"] == "train").any())

    def with_class_names(self, classes: Sequence[str]) -> "Tables":
        """Return the tables with the names of the classes in place of their numbers, except in `scores`."""
        tables = {name: with_class_names(table, classes) for name, table in vars(self).items() if name != "scores"}
        return dataclasses.replace(self, scores=self.scores, **tables)


@dataclass(frozen=True, kw_only=True)
class Results:
    """The analyses of all members of a training."""

    seeds: Sequence[int]  # of the members
    tables: Tables  # of a single member, or of the mean scores over several; with names of classes
    analysis: GradientAnalysis  # analysis of the first member: classes and noise scales are of this one alone
    metrics: dict[str, float]  # of a single member, or means and spreads over several
    classes: Sequence[str]
    num_train: int  # number of training examples, of which a sample may be analyzed
    scratch: Path  # folder with the scores of each member

    def write(self, folder: Path) -> None:
        """Write the tables, and the scores of each of several members.

        Without training examples, tables about them have no rows; `label_error_scores` is left out if it has none.
        """
        folder.mkdir(parents=True)
        if len(self.seeds) > 1:
            shutil.copytree(self.scratch, folder / FOLDER)
        self.tables.scores.to_parquet(folder / SCORES, index=False)
        for name, table in vars(self.tables).items():
            if name != "scores" and (len(table) or name != "label_error_scores"):
                table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def analyze_members(
    passes: GradientPasses,
    members: Iterable[MemberInputs],
    splits: Mapping[str, Split],
    rows: Rows,
    config: GradientsConfig,
) -> Iterator[tuple[int, pd.DataFrame, GradientAnalysis]]:
    """Yield the seed of each member, its table of all examples and its analysis; `rows` are the training examples."""
    splits = take_train(splits, rows)
    for member in members:
        visits = num_visits(member.trajectory, splits)
        with progress_bar(f"gradients seed {member.seed}", visits, unit="steps") as bar:
            num_classes = member.about.dataset.num_classes
            analysis = analyze(passes, member.trajectory, splits, config, num_classes, advance=bar.advance)
        dynamics = {name: values[rows] for name, values in member.dynamics.items()}
        yield member.seed, score_table(splits, analysis.scores, dynamics), analysis


def collect(
    members: Iterable[tuple[int, pd.DataFrame, GradientAnalysis]],
    config: GradientsConfig,
    scratch: Path,
    *,
    classes: Sequence[str],
    num_train: int,
) -> Results:
    """Return the results of all members; the scores of each are written to a file, memory holds those of the first."""
    paths, metrics = dict[int, Path](), []
    for seed, scores, analysis in members:
        tables = make_tables(scores, analysis, config)
        if not paths:
            first, first_tables = analysis, tables
        paths[seed] = scratch / f"seed_{seed}.parquet"
        scores.to_parquet(paths[seed], index=False)
        metrics.append(measure(tables, analysis))
    sampled = len(first_tables.train)
    tables = make_tables(mean_scores([*paths.values()]), first, config) if len(paths) > 1 else first_tables
    return Results(
        seeds=[*paths],
        tables=tables.with_class_names(classes),
        analysis=first,
        metrics=over_members(metrics) | ({"sampled_train_examples": sampled} if sampled < num_train else {}),
        classes=classes,
        num_train=num_train,
        scratch=scratch,
    )


def mean_scores(paths: list[Path]) -> pd.DataFrame:
    """Return a row for each example: means and standard errors of scores over at least two members, column by column.

    A mean is over the members that have the score. `predicted` is the class that most members predict, the first of
    several such classes; `correct` follows from it.
    """
    identity = pd.read_parquet(paths[0], columns=_IDENTITY)
    names = {path: pq.read_schema(path).names for path in paths}
    columns: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for path in paths for name in names[path]):
        if name in (*_IDENTITY, "predicted", "correct"):
            continue
        with_score = [path for path in paths if name in names[path]]
        values = [pd.read_parquet(path, columns=[name])[name].to_numpy(np.float64) for path in with_score]
        columns[name] = np.mean(values, axis=0).astype(np.float32)
        if name in WITH_ERROR:
            error = np.std(values, axis=0, ddof=1) / math.sqrt(len(values))
            columns[f"{name}{STANDARD_ERROR}"] = error.astype(np.float32)
    predicted = np.array([pd.read_parquet(path, columns=["predicted"])["predicted"] for path in paths])
    votes = [np.sum(predicted == label, axis=0) for label in range(int(predicted.max()) + 1)]
    columns["predicted"] = np.argmax(votes, axis=0).astype(np.int32)
    columns["correct"] = columns["predicted"] == identity["label"].to_numpy()
    return pd.concat([identity, pd.DataFrame(columns)], axis=1)


def score_table(
    splits: Mapping[str, Split], scores: Mapping[str, Mapping[str, np.ndarray]], dynamics: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """Return a row for each example of each split: its id, its labels, its scores and its suspicion.

    The columns of `dynamics`, which are about the training split, are NaN for the other splits. The suspicion is one
    minus the mean probability of the label: over all epochs for training examples, over the kept epochs for others. A
    network learns regular patterns first (Arpit et al., arXiv 1706.05394), so the mean over a training detects a wrong
    label better than the final probability, when many wrong labels have been memorized.
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
        if name in scores
    ]
    table = pd.concat(parts, ignore_index=True)
    return table.assign(**{SUSPICION: 1 - table["mean_probability"].fillna(table[f"probability{MEAN}"])})


def make_tables(scores: pd.DataFrame, analysis: GradientAnalysis, config: GradientsConfig) -> Tables:
    """Make all tables of an analysis from the table of all examples."""
    split_rows = [
        {"split": str(split)}
        | summarize({name: part[name].to_numpy() for name in part.columns}, top_fraction=config.top_fraction)
        for split, part in scores.groupby("split", observed=True)
    ]
    noise_rows = [
        (epoch, scale.value, scale.low, scale.high, scale.trace, scale.squared_norm, analysis.sharpness[epoch])
        for epoch, scale in analysis.noise_scales.items()
    ]
    return Tables(
        scores=scores,
        largest=scores.iloc[largest(scores["grad_norm"].to_numpy(), config.num_largest)][_SHOWN],
        suspects=pd.concat([rank_suspects(scores, name, config.num_suspects) for name in SUSPECT_SPLITS])[_SUSPECT],
        label_error_scores=detection_table(_rows_of(scores, "train"), analysis.noise_scales),
        splits=pd.DataFrame(split_rows),
        norms=norm_table(scores),
        noise_scale=pd.DataFrame(noise_rows, columns=_NOISE_SCALE),
        classes=class_table(analysis),
    )


def rank_suspects(table: pd.DataFrame, split: str, count: int) -> pd.DataFrame:
    """Return the `count` examples of a split with the highest suspicion, the highest first."""
    part = table[table["split"] == split]
    return part.iloc[largest(part[SUSPICION].to_numpy(), count)]


def detection_table(train: pd.DataFrame, epochs: Iterable[int]) -> pd.DataFrame:
    """Return how well each score finds the training labels that label noise changed; `epochs` are the kept ones.

    Returns:
        A row for each score and epoch, the best first: `auroc` and `average_precision`; and with as many suspects as
        there are wrong labels, `precision` and `false_negative_rate`, the share of wrong labels that are not among the
        suspects. No rows if no label is wrong, or all are.
    """
    is_wrong = (train["label"] != train["true_label"]).to_numpy()
    if not is_wrong.any() or is_wrong.all():
        return pd.DataFrame(columns=_DETECTION)
    from sklearn.metrics import average_precision_score, roc_auc_score  # late: only label noise needs this second

    columns = {
        (name, epoch): column
        for name in EPOCH_SCORES
        for epoch, column in {
            **{str(epoch): epoch_column(name, epoch) for epoch in epochs},
            "mean": f"{name}{MEAN}",
        }.items()
    }
    rows = []
    for (name, epoch), column in (columns | {(name, ""): name for name in _SINGLE}).items():
        values = train[column].to_numpy(np.float64)
        suspect = -values if name in _LOW_IS_SUSPECT else values
        recall = np.mean(is_wrong[largest(suspect, int(is_wrong.sum()))])
        areas = roc_auc_score(is_wrong, suspect), average_precision_score(is_wrong, suspect)
        rows.append((name, epoch, *areas, recall, 1 - recall))
    return pd.DataFrame(rows, columns=_DETECTION).sort_values("average_precision", ascending=False, ignore_index=True)


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


def class_table(analysis: GradientAnalysis) -> pd.DataFrame:
    """Return a row for each class: share of a step's decrease in loss, cosine and coherence with every class.

    No rows if there are no training examples.
    """
    classes = analysis.classes
    numbers = range(len(classes.share))
    columns = {
        "class": list(numbers),
        "share": classes.share,
        **{f"cosine_{other}": classes.cosine[:, other] for other in numbers},
        **{f"coherence_{other}": classes.coherence[:, other] for other in numbers},
    }
    return pd.DataFrame(columns)[: None if analysis.noise_scales else 0]


def measure(tables: Tables, analysis: GradientAnalysis) -> dict[str, float]:
    """Return the metrics: the summary of the training split, the median norms of the others, and those of the analysis.

    The typical noise scale is the (upper) median of the finite ones. Metrics that are not finite are left out, and
    without training examples those about them.
    """
    splits = {str(row.pop("split")): row for row in tables.splits.to_dict("records")}
    metrics: dict[str, float] = {"num_examples": len(tables.scores)}
    metrics |= {
        f"{split}_grad_norm_median": row["grad_norm_median"] for split, row in splits.items() if split != "train"
    }
    if not tables.has_training_rows:
        return metrics
    train, first = tables.train, epoch_column("grad_norm", min(analysis.noise_scales))
    finite = sorted(scale.value for scale in analysis.noise_scales.values() if math.isfinite(scale.value))
    of_training = {
        "noise_scale_typical": finite[len(finite) // 2] if finite else math.nan,
        "sharpness": analysis.sharpness[max(analysis.sharpness)],
        "coherence_within_classes": analysis.classes.within,
        "coherence_across_classes": analysis.classes.across,
        "forgetting_events_mean": float(np.mean(train["forgetting_events"])),
        "never_correct": float(np.mean(train["first_correct_epoch"] == 0)),
        "first_grad_norm_rank_correlation_input_norm": rank_correlation(
            train[first].to_numpy(), train["input_norm"].to_numpy()
        ),
    }
    for row in tables.label_error_scores.query("score == 'mean_probability'").to_dict("records"):
        of_training |= {f"label_errors_{name}": row[name] for name in _DETECTION[2:]}
    metrics |= {str(name): value for name, value in splits["train"].items()}
    return metrics | {name: value for name, value in of_training.items() if math.isfinite(value)}


def _rows_of(table: pd.DataFrame, split: str) -> pd.DataFrame:
    return table[table["split"] == split].reset_index(drop=True)
