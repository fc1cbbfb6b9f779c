"""Per-example scores as tables: all of them for later analyses, the largest gradients for people."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.examples import Split
from gradtrail.core.scores import GradientsConfig, largest, summarize

SHOWN = ["split", "example_id", "label", "predicted", "grad_norm", "el2n", "loss", "margin"]


def score_table(splits: Mapping[str, Split], scores: Mapping[str, Mapping[str, np.ndarray]]) -> pd.DataFrame:
    """Return a row for each example of each split: who it is, and its scores."""
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
            }
        )
        for name, split in splits.items()
    ]
    return pd.concat(parts, ignore_index=True)


def write_tables(folder: Path, table: pd.DataFrame, config: GradientsConfig) -> None:
    """Write `scores.parquet`, every example, and `largest.csv`, those with the largest gradients, to a new folder."""
    folder.mkdir(parents=True)
    table.to_parquet(folder / "scores.parquet", index=False)
    select_largest(table, config.num_largest)[SHOWN].to_csv(folder / "largest.csv", index=False, float_format="%.6g")


def select_largest(table: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return the examples with the largest gradients over all splits, the largest first."""
    return table.iloc[largest(table["grad_norm"].to_numpy(), count)]


def measure(table: pd.DataFrame, config: GradientsConfig) -> dict[str, float]:
    """Return the metrics of a score table: the summary of the training split by itself, that of others by split."""
    metrics: dict[str, float] = {"num_examples": len(table)}
    for split, part in table.groupby("split", observed=True):
        columns = {name: part[name].to_numpy() for name in part.columns}
        summary = summarize(columns, top_fraction=config.top_fraction)
        prefix = "" if split == "train" else f"{split}_"
        metrics |= {f"{prefix}{name}": value for name, value in summary.items()}
    return metrics
