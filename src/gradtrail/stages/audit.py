"""Tables, metrics and figures of an audit: a row for every label, and how well each score finds planted wrong ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.audit.labels import CANDIDATES, Findings, OutOfFold, find_errors, fit_temperature, label_scores
from gradtrail.core.data import Split
from gradtrail.core.evaluate import Bins, fill_bins
from gradtrail.stages.common import plotting

_BINS = 15  # of the calibration error
_LIKELY = 0.5  # probability from which a label counts as probably wrong


def detection_table(planted: Mapping[str, OutOfFold], correct: np.ndarray) -> pd.DataFrame:
    """Return the quality of each score as a detector of planted labels, which differ from the correct ones."""
    from sklearn.metrics import average_precision_score, roc_auc_score  # here: it takes a second to import

    rows = []
    for kind, copy in planted.items():
        scores = label_scores(copy.logits, copy.labels, fit_temperature(copy))
        is_wrong = copy.labels != correct
        for name, values in {**scores, "grad_norm": copy.grad_norm}.items():
            rows.append((kind, name, roc_auc_score(is_wrong, values), average_precision_score(is_wrong, values)))
    return pd.DataFrame(rows, columns=["noise", "score", "auroc", "average_precision"])


def choose_score(detection: pd.DataFrame) -> str:
    """Return the candidate with the largest mean AUROC over the kinds of noise.

    Average precision would count wrong labels of the data set itself, at the top of the ranking, as mistakes.
    """
    means = detection.groupby("score", sort=True)["auroc"].mean()
    return str(means[list(CANDIDATES)].idxmax())


def calibrate(planted: Mapping[str, OutOfFold], correct: np.ndarray, chosen: str, *, seed: int) -> dict[str, Bins]:
    """Return, for each kind of noise, the probabilities of being wrong against the share of planted labels.

    The probabilities follow from the planted labels alone, without the correct ones.
    """
    curves = {}
    for label_set, (kind, copy) in enumerate(planted.items(), start=1):
        findings = find_errors({"train": copy}, chosen, seed=seed, label_set=label_set)["train"]
        curves[kind] = fill_bins(findings.probability_wrong, copy.labels != correct, _BINS)
    return curves


def suspect_table(splits: Mapping[str, Split], findings: Mapping[str, Findings], chosen: str) -> pd.DataFrame:
    """Return a row for each example of each split, within a split the most suspicious first."""
    parts = []
    for name, split in splits.items():
        finding = findings[name]
        part = pd.DataFrame(
            {
                "split": pd.Categorical([name] * len(split), categories=list(splits)),
                "example_id": split.example_id,
                "label": split.labels,
                "score": finding.scores[chosen],
                "proposed_label": finding.proposed,
                "proposed_probability": finding.proposed_probability.astype(np.float32),
                "probability_wrong": finding.probability_wrong.astype(np.float32),
                **{key: values.astype(np.float32) for key, values in finding.scores.items()},
            }
        )
        parts.append(part.sort_values(["score", "example_id"], ascending=[False, True]))
    return pd.concat(parts, ignore_index=True)


def audit_metrics(
    findings: Mapping[str, Findings],
    splits: Mapping[str, Split],
    detection: pd.DataFrame,
    calibration: Mapping[str, Bins],
    chosen: str,
) -> dict[str, float | str]:
    """Return the metrics of an audit, flat."""
    metrics: dict[str, float | str] = {"score": chosen}
    for name, finding in findings.items():
        count = len(finding.proposed)
        metrics |= {
            f"{name}/agreement": float(np.mean(finding.proposed == splits[name].labels)),
            f"{name}/expected_errors": finding.rate.value * count,
            f"{name}/expected_errors_low": finding.rate.low * count,
            f"{name}/expected_errors_high": finding.rate.high * count,
            f"{name}/probably_wrong": int(np.sum(finding.probability_wrong >= _LIKELY)),
        }
    for noise, score, auroc, precision in detection.itertuples(index=False):
        metrics |= {f"{noise}/{score}/auroc": auroc, f"{noise}/{score}/average_precision": precision}
        if score == chosen:
            metrics |= {f"{noise}/auroc": auroc, f"{noise}/average_precision": precision}
    return metrics | {
        f"{kind}/calibration_error": curve.expected_calibration_error for kind, curve in calibration.items()
    }


def write_tables(
    folder: Path, suspects: pd.DataFrame, detection: pd.DataFrame, calibration: Mapping[str, Bins]
) -> None:
    """Write the tables to a new folder: `suspects.parquet`, `detection.csv` and `calibration.csv`."""
    folder.mkdir(parents=True)
    suspects.to_parquet(folder / "suspects.parquet", index=False)
    detection.to_csv(folder / "detection.csv", index=False, float_format="%.6g")
    parts = [pd.DataFrame(vars(curve)).dropna().assign(noise=kind) for kind, curve in calibration.items()]
    table = pd.concat(parts)[["noise", "count", "confidence", "accuracy"]]
    table = table.rename(columns={"confidence": "probability_wrong", "accuracy": "share_wrong"})
    table.to_csv(folder / "calibration.csv", index=False, float_format="%.6g")


def write_figures(
    folder: Path,
    suspects: pd.DataFrame,
    splits: Mapping[str, Split],
    calibration: Mapping[str, Bins],
    title: str,
    num_suspects: int,
    classes: Sequence[str],
) -> None:
    """Write `suspects_<split>.png` and `calibration.png`."""
    would_change = suspects[suspects["proposed_label"] != suspects["label"]]
    for name, split in splits.items():
        part = would_change[would_change["split"] == name].head(num_suspects)
        rows = pd.Index(split.example_id).get_indexer(part["example_id"])
        columns = part[["label", "proposed_label", "probability_wrong"]].itertuples(index=False)
        captions = [plotting.arrow(classes[label], classes[new], f"\n{wrong:.0%}") for label, new, wrong in columns]
        heading = f"Suspected label errors: given → proposed, chance that the given one is wrong · {name} · {title}"
        plotting.save(plotting.gallery(split.images[rows], captions, heading), folder / f"suspects_{name}.png")

    # the share of planted labels against the probability of being wrong, for each kind of noise
    figure, axes = plotting.new_figure(f"Planted labels found wrong · {title}", size=(6, 4.8))
    axes[0, 0].plot([0, 1], [0, 1], color=plotting.GREY, linewidth=1, label="as probable as stated")
    for (kind, curve), colour in zip(calibration.items(), plotting.CYCLE, strict=False):
        is_filled = curve.count > 0
        sizes = 4 + 10 * np.log10(curve.count[is_filled])
        places = curve.confidence[is_filled], curve.accuracy[is_filled]
        label = f"{kind}: calibration error {curve.expected_calibration_error:.4f}"
        axes[0, 0].plot(*places, color=colour, linewidth=1)
        axes[0, 0].scatter(*places, s=sizes, color=colour, label=label)
    axes[0, 0].set(xlabel="probability that the label is wrong", ylabel="share that was planted", xlim=(-0.02, 1.02))
    axes[0, 0].legend(loc="upper left")
    plotting.save(figure, folder / "calibration.png")
