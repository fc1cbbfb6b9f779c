"""The gallery of the report: mistakes, largest gradients and suspected label errors, each example once."""

import io
import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from PIL import Image

from gradtrail.stages.report.numbers import Row, Sources

# Scores that order the examples: the probability of the predicted class (for test examples alone), the norm of the
# gradient, one minus the mean probability of the label over the training, and its final probability.
_SCORES = ("confidence", "norm", "suspicion", "probability")
_PIXELS = 640_000  # of all mistakes together, those of each channel: 816 images of MNIST, 208 of CIFAR-10
_FEWEST, _MOST = 20, 800  # mistakes, whatever their size
_CORRECT = 4  # examples of each class


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The examples that the page shows, each once."""

    examples: list[Row]
    groups: dict[str, list[Hashable]]  # criterion → the examples chosen by it, as (split, example_id)

    @property
    def splits(self) -> list[str]:
        """The splits that the examples are of."""
        return sorted({example["split"] for example in self.examples})

    @property
    def cells(self) -> dict[tuple[int, int], Row]:
        """The first test example of the gallery in each cell, (label, predicted), of the confusion matrix."""
        examples = [example for example in self.examples if {"mistakes", "correct"} & set(example["groups"])]
        return {(example["label"], example["predicted"]): example for example in reversed(examples)}


def make_gallery(sources: Sources) -> Gallery:
    """Return the examples that the page shows."""
    table = all_examples(sources)
    limit = min(max(_PIXELS // math.prod(sources.info.image_shape), _FEWEST), _MOST)
    groups = {
        "mistakes": mistakes(table, limit),
        "largest": listed(sources.table("gradients/largest"), table),
        "suspects": listed(sources.table("gradients/suspects"), table),
        "correct": least_confident(table),
    }
    keys = list(dict.fromkeys(key for group in groups.values() for key in group))
    rows = table.loc[keys].reset_index().astype({"predicted": int}).to_dict("records")
    examples = [
        row
        | {
            "groups": [name for name, group in groups.items() if key in group],
            "scores": {name: row[name] for name in _SCORES if np.isfinite(row[name])},
            "png": encode_png(sources.splits[row["split"]].images[row["position"]]),
            "file": "" if (files := sources.splits[row["split"]].files) is None else files[row["position"]],
        }
        for key, row in zip(keys, rows, strict=True)
    ]
    return Gallery(examples=examples, groups=groups)


def all_examples(sources: Sources) -> pd.DataFrame:
    """Return a row for each example by (split, example_id), with NaN for scores that are not known.

    On the test split, the predictions are those of the evaluation. The table of scores may be that of a sample.
    """
    splits = [
        pd.DataFrame(
            {
                "split": name,
                "example_id": split.example_id,
                "position": np.arange(len(split)),
                "label": split.labels,
                "true_label": split.true_labels,
            }
        )
        for name, split in sources.splits.items()
    ]
    key = ["split", "example_id"]
    scores = sources.scores.rename(columns={"grad_norm": "norm"}).set_index(key)
    table = pd.concat(splits).set_index(key).join(scores)
    test = sources.predictions.assign(split="test").set_index(key).reindex(table.index)
    return table.assign(confidence=test["probability"], predicted=test["predicted"].fillna(table["predicted"]))


def mistakes(table: pd.DataFrame, limit: int) -> list[Hashable]:
    """Return the misclassified test examples, the most confident first.

    If there are more than `limit`, each pair of label and prediction keeps its most confident ones: the first of every
    pair before the second of any.
    """
    is_mistake = table["confidence"].notna() & (table["label"] != table["predicted"])
    rows = table[is_mistake].sort_values("confidence", ascending=False, kind="stable")
    rank = rows.groupby(["label", "predicted"]).cumcount()
    rows = rows.loc[rank.sort_values(kind="stable").index[:limit]]
    return list(rows.sort_values("confidence", ascending=False, kind="stable").index)


def least_confident(table: pd.DataFrame) -> list[Hashable]:
    """Return the correctly classified test examples of each class that have the lowest confidence."""
    is_correct = table["confidence"].notna() & (table["label"] == table["predicted"])
    rows = table[is_correct].sort_values("confidence", kind="stable")
    return list(rows[rows.groupby("label").cumcount() < _CORRECT].index)


def listed(rows: list[Row], table: pd.DataFrame) -> list[Hashable]:
    """Return the examples that a table of `gradients` lists; those left out are not in the sample of a large split."""
    return [key for row in rows if (key := (row["split"], row["example_id"])) in table.index]


def encode_png(image: np.ndarray) -> bytes:
    """Return the image as a PNG: in color as it is, grayscale as dark ink on white."""
    stream = io.BytesIO()
    Image.fromarray(255 - image if image.ndim == 2 else image).save(stream, "PNG", compress_level=9)
    return stream.getvalue()
