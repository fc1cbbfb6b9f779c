"""Labels that look wrong: a ranking of the examples, and how good each score would be where the truth is known."""

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd

from gradtrail.core.gradient_analysis import FOLLOWED, MEAN
from gradtrail.core.ranking import largest

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
