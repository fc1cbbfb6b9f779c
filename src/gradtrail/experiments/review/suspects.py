"""The labels to review, the most suspicious first, each with the most similar training images."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, UInt8

from gradtrail.core.data import Split
from gradtrail.stages.artifacts.parquet import read_parquet
from gradtrail.support.errors import UserError

PATH = Path("results/audit/suspects.parquet")
_COLUMNS = [
    *("split", "example_id", "label", "score"),
    *("proposed_label", "proposed_probability", "probability_wrong"),
]
_BLOCK = 4096  # training images per comparison: 13 MB for MNIST


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """An example whose label may be wrong."""

    split: str
    example_id: int  # position in the original file
    label: int  # given class, before corrections
    proposed_label: int  # most probable class
    proposed_probability: float  # probability of that class
    probability_wrong: float  # probability that the given label is wrong
    image: UInt8[np.ndarray, "height width"]
    neighbours: Int[np.ndarray, " neighbours"]  # rows of the training split, the most similar image first

    @property
    def example(self) -> tuple[bool, int]:
        """The key of the example in a file of corrections."""
        return self.split == "test", self.example_id


def read_suspects(path: Path) -> pd.DataFrame:
    """Read the audit's table, one row per example, the most suspicious first; raise UserError if there is none."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; run `make audit` first, which finds the labels to look at")
    table = read_parquet(path, _COLUMNS, made_by="make audit")
    return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def choose_suspects(
    table: pd.DataFrame, splits: Mapping[str, Split], *, limit: int, num_neighbours: int, path: Path = PATH
) -> list[Suspect]:
    """Return the first rows of a table as suspects, with their images and neighbours.

    Args:
        table: Rows of the audit, the most suspicious first.
        splits: Splits of the data set.
        limit: Maximum number of suspects.
        num_neighbours: Number of neighbours per suspect; fewer if the training split is smaller.
        path: File to name in errors.

    Raises:
        UserError: The table was made for other data.
    """
    chosen: list[dict[Any, Any]] = table.head(limit).to_dict("records")
    if not chosen:
        raise UserError(f"{path}: no example to review; another --split may have some")
    row_splits = [splits[row["split"]] for row in chosen]
    places = [_place(split, row, path) for split, row in zip(row_splits, chosen, strict=True)]
    images = np.stack([split.images[place] for split, place in zip(row_splits, places, strict=True)])
    itself = np.array([place if row["split"] == "train" else -1 for row, place in zip(chosen, places, strict=True)])
    neighbours = nearest(images, splits["train"].images, itself, num_neighbours)
    return [
        Suspect(
            split=row["split"],
            example_id=row["example_id"],
            label=int(split.given_labels[place]),
            proposed_label=row["proposed_label"],
            proposed_probability=row["proposed_probability"],
            probability_wrong=row["probability_wrong"],
            image=image,
            neighbours=near,
        )
        for row, split, place, image, near in zip(chosen, row_splits, places, images, neighbours, strict=True)
    ]


def nearest(
    images: UInt8[np.ndarray, "suspects height width"],
    among: UInt8[np.ndarray, "examples height width"],
    itself: Int[np.ndarray, " suspects"],
    count: int,
) -> Int[np.ndarray, "suspects count"]:
    """Return the rows of the candidates that differ least from an image, by the sum of squares over all pixels.

    Args:
        images: Images whose neighbours are searched.
        among: Candidates.
        itself: Row of each image among the candidates, which is excluded; -1 if it is not among them.
        count: Number of neighbours; fewer if there are fewer candidates.
    """
    queries = _flat(images)
    best: np.ndarray = np.empty((len(images), 0), np.int64)
    distances: np.ndarray = np.empty((len(images), 0), np.float32)
    for start in range(0, len(among), _BLOCK):
        block = _flat(among[start : start + _BLOCK])
        places = np.arange(start, start + len(block))
        block_distances = np.sum(block**2, axis=1) - 2 * queries @ block.T  # less the query's square: the same order
        block_distances[itself[:, None] == places] = np.inf
        best = np.hstack([best, np.broadcast_to(places, block_distances.shape)])
        distances = np.hstack([distances, block_distances])
        order = np.argsort(distances, axis=1, kind="stable")[:, :count]
        best, distances = (np.take_along_axis(array, order, axis=1) for array in (best, distances))
    return best[:, : min(count, len(among) - int(np.any(itself >= 0)))]


def _flat(images: np.ndarray) -> Float[np.ndarray, "images pixels"]:
    return images.reshape(len(images), -1).astype(np.float32) / 255


def _place(split: Split, row: Mapping[Any, Any], path: Path) -> int:
    """Return the row of an example in its split."""
    name, number, label = row["split"], row["example_id"], row["label"]
    place = int(np.searchsorted(split.example_id, number))
    if place == len(split) or split.example_id[place] != number:
        raise UserError(f"{path}: data/processed has no {name} {number}; run `make audit` again")
    labels = {int(column[place]) for column in (split.labels, split.given_labels, split.corrected_labels)}
    if label not in labels:
        raise UserError(f"{path}: {name} {number} has label {label}, in data/processed {min(labels)}; run `make audit`")
    return place
