"""The labels to look at, the most suspicious first, with the training images that are most like each."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, UInt8

from gradtrail.core.common.split import Split
from gradtrail.stages.artifacts.parquet import read_parquet
from gradtrail.stages.common.dataset import SPLITS
from gradtrail.support.errors import UserError, one_line

PATH = Path("results/audit/suspects.parquet")
_NUMBERS = {
    "example_id": "i",
    "label": "i",
    "score": "f",
    "proposed_label": "i",
    "proposed_probability": "f",
    "probability_wrong": "f",
}
_BLOCK = 4096  # training images that are compared at a time: 13 MB of MNIST's


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """An example whose label may be wrong.

    Attributes:
        split: that it is in.
        example_id: position in the original file.
        label: given class, before corrections.
        proposed_label: most probable class.
        proposed_probability: of that class.
        probability_wrong: that the given label is wrong.
        image: uint8 pixels.
        neighbours: rows of the training split, the most similar image first.
    """

    split: str
    example_id: int
    label: int
    proposed_label: int
    proposed_probability: float
    probability_wrong: float
    image: UInt8[np.ndarray, "height width"]
    neighbours: Int[np.ndarray, " neighbours"]

    @property
    def example(self) -> tuple[bool, int]:
        """Names the example as a correction does."""
        return self.split == "test", self.example_id


def read_suspects(path: Path, num_classes: int) -> pd.DataFrame:
    """Read the audit's table: a row for each example, the most suspicious first.

    Args:
        path: of `suspects.parquet`.
        num_classes: of the data set.

    Raises:
        UserError: one line that names the file and what is wrong with it.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; run `make audit` first, which finds the labels to look at")
    table = read_parquet(path, ["split", *_NUMBERS], made_by="make audit")
    for name, kind in _NUMBERS.items():
        if table[name].dtype.kind != kind or not np.isfinite(table[name]).all():
            wanted = "integers" if kind == "i" else "finite numbers"
            raise UserError(f"{path}: {name} must be {wanted}, found {table[name].dtype}")
    for name in ("label", "proposed_label"):
        if not table[name].between(0, num_classes - 1).all():
            raise UserError(f"{path}: {name} must be 0 to {num_classes - 1}; `make audit` makes the file anew")
    if unknown := set(table["split"]) - set(SPLITS):
        raise UserError(f"{path}: split must be one of {', '.join(SPLITS)}, got {one_line(min(map(str, unknown)))}")
    return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def choose_suspects(
    table: pd.DataFrame, splits: Mapping[str, Split], *, limit: int, num_neighbours: int, path: Path = PATH
) -> list[Suspect]:
    """Return the first rows of a table as suspects, with their images and neighbours.

    Args:
        table: the most suspicious first.
        splits: the data set.
        limit: number of suspects at most.
        num_neighbours: of each, fewer where the training split has fewer images.
        path: that errors name.

    Raises:
        UserError: the table was made for other data; one line.
    """
    chosen: list[dict[Any, Any]] = table.head(limit).to_dict("records")
    if not chosen:
        raise UserError(f"{path}: no example to look at; another --split may have some")
    found = [splits[row["split"]] for row in chosen]
    places = [_place(split, row, path) for split, row in zip(found, chosen, strict=True)]
    images = np.stack([split.images[place] for split, place in zip(found, places, strict=True)])
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
        for row, split, place, image, near in zip(chosen, found, places, images, neighbours, strict=True)
    ]


def nearest(
    images: UInt8[np.ndarray, "suspects height width"],
    among: UInt8[np.ndarray, "examples height width"],
    itself: Int[np.ndarray, " suspects"],
    count: int,
) -> Int[np.ndarray, "suspects count"]:
    """Return the rows of the images that differ least from each image, by the sum of squares over all pixels.

    Args:
        images: that neighbours are looked for.
        among: the candidates.
        itself: row of each image among the candidates, which is no neighbour; -1 where it is none of them.
        count: of neighbours, fewer where there are fewer candidates.
    """
    wanted = _flat(images)
    best: np.ndarray = np.empty((len(images), 0), np.int64)
    distances: np.ndarray = np.empty((len(images), 0), np.float32)
    for start in range(0, len(among), _BLOCK):
        block = _flat(among[start : start + _BLOCK])
        places = np.arange(start, start + len(block))
        found = np.sum(block**2, axis=1) - 2 * wanted @ block.T  # the image's own square changes no order
        found[itself[:, None] == places] = np.inf
        best = np.hstack([best, np.broadcast_to(places, found.shape)])
        distances = np.hstack([distances, found])
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
        raise UserError(f"{path}: data/processed has no {name} {number}; `make audit` makes the file anew")
    known = {int(labels[place]) for labels in (split.labels, split.given_labels, split.corrected_labels)}
    if label not in known:
        raise UserError(f"{path}: {name} {number} has label {label}, in data/processed {min(known)}; run `make audit`")
    return place
