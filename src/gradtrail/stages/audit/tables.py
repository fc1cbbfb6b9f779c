"""Tables and metrics of an audit: a row for every label, and how well each score finds planted wrong labels."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.audit.findings import Findings
from gradtrail.core.audit.planting import NoiseKind, Planted
from gradtrail.core.audit.scores import CANDIDATES, fit_temperature, label_scores
from gradtrail.core.data import Split
from gradtrail.core.evaluate import Bins, bins_of_equal_width, fill_bins

SUSPECT = ["split", "example_id", "label", "score", "proposed_label", "proposed_probability", "probability_wrong"]
_BINS = 15  # of the calibration error
_LIKELY = 0.5  # probability from which a label counts as probably wrong


def detection_table(planted: Mapping[NoiseKind, Planted]) -> pd.DataFrame:
    """Return the quality of each score as a detector of planted wrong labels.

    Returns:
        A row for each kind of noise and score: `noise`, `score`, `auroc`, `average_precision`.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score  # here: it takes a second to import

    rows = []
    for kind, one in planted.items():
        logits = one.out_of_fold.logits
        scores = label_scores(logits, one.labels, fit_temperature(logits, one.labels))
        for name, values in {**scores, "grad_norm": one.out_of_fold.grad_norm}.items():
            rows.append(
                (kind, name, roc_auc_score(one.is_wrong, values), average_precision_score(one.is_wrong, values))
            )
    return pd.DataFrame(rows, columns=["noise", "score", "auroc", "average_precision"])


def choose_score(detection: pd.DataFrame) -> str:
    """Return the candidate with the largest mean AUROC over the kinds of noise.

    Average precision would count wrong labels of the data set itself, at the top of the ranking, as mistakes.
    """
    means = detection.groupby("score", sort=True)["auroc"].mean()
    return str(means[list(CANDIDATES)].idxmax())


def suspect_table(splits: Mapping[str, Split], findings: Mapping[str, Findings], chosen: str) -> pd.DataFrame:
    """Return a row for each example of each split, within a split the most suspicious first.

    Columns: those of `SUSPECT`, then all scores by name.
    """
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


def calibration_of(planted: Mapping[NoiseKind, Planted], findings: Mapping[NoiseKind, Findings]) -> dict[str, Bins]:
    """Return, for each kind of noise, the probabilities of being wrong against the share of planted labels."""
    probabilities = {kind: findings[kind].probability_wrong for kind in planted}
    bins = {kind: bins_of_equal_width(probability, _BINS) for kind, probability in probabilities.items()}
    return {kind: fill_bins(bins[kind], probabilities[kind], one.is_wrong, _BINS) for kind, one in planted.items()}


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


def measure(
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
    return metrics | {f"{kind}/calibration_error": one.expected_calibration_error for kind, one in calibration.items()}
