"""The report's gallery: mistakes, largest gradients and suspected label errors, each example once."""

import io
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from PIL import Image

from gradtrail.core.data import Split
from gradtrail.stages.report.inputs import Sources

_PIXELS = 640_000  # of all mistakes together: 816 images of MNIST
_FEWEST, _MOST = 20, 800  # mistakes, whatever their size
_CORRECT = 4  # of each class
_DARK = 255


@dataclass(frozen=True, kw_only=True)
class Group:
    """Examples chosen by one criterion."""

    id: str  # id in the page's markup
    name: str
    score: str  # id of the score that orders them
    number: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example of the gallery."""

    split: str
    example_id: int
    label: int
    predicted: int
    true_label: int
    groups: tuple[str, ...]  # ids of the example's groups
    scores: Mapping[str, float]  # id of a score → value
    png: bytes  # the image, dark ink on white

    @property
    def id(self) -> str:
        """Its id on the page."""
        return f"{self.split}-{self.example_id}"


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The examples in order, and their filters."""

    examples: list[Example]
    groups: list[Group]
    num_classes: int

    @property
    def splits(self) -> list[str]:
        """The splits that the examples are of."""
        return sorted({example.split for example in self.examples})

    @property
    def cells(self) -> dict[tuple[int, int], Example]:
        """(label, predicted) → the first example of the evaluation in that cell of the confusion matrix."""
        examples = [example for example in self.examples if {"mistakes", "correct"} & set(example.groups)]
        return {(example.label, example.predicted): example for example in reversed(examples)}


SCORES = {
    "confidence": "confidence",
    "norm": "gradient norm",
    "suspicion": "suspicion",
    "probability": "probability of the label",
}
"""Scores of an example, id → name: the probability of the predicted class (test examples alone), the norm of the
gradient, the suspicion of the label (one minus its mean probability over the training), its final probability."""


def make_gallery(sources: Sources) -> Gallery:
    """Return the examples that the page shows, each once."""
    table = _scored(sources)
    chosen = {
        ("mistakes", "Mistakes", "confidence"): spread(table[table["confidence"].notna()], _limit(sources)),
        ("largest", "Largest gradients", "norm"): _named_examples(sources, "gradients/largest"),
        ("suspects", "Suspected label errors", "suspicion"): _named_examples(sources, "gradients/suspects"),
        ("correct", "Least confident correct", "confidence"): _least_confident(table),
    }
    groups = [Group(id=key, name=name, score=by, number=len(ids)) for (key, name, by), ids in chosen.items()]
    members: dict[Hashable, list[str]] = {}
    for (key, _, _), ids in chosen.items():
        for example in ids:
            members.setdefault(example, []).append(key)
    rows = table.reindex(list(members)).reset_index().to_dict("records")
    positions = {
        split: {int(example): index for index, example in enumerate(part.example_id)}
        for split, part in sources.splits.items()
    }
    examples = [
        _example(row, tuple(ids), sources.splits[row["split"]], positions[row["split"]][row["example_id"]])
        for row, ids in zip(rows, members.values(), strict=True)
    ]
    return Gallery(examples=examples, groups=groups, num_classes=sources.info.num_classes)


def spread(table: pd.DataFrame, limit: int) -> list[Hashable]:
    """Return the index of the mistakes of a table, the most confident first.

    If there are more than `limit`, each pair of label and prediction keeps its most confident ones: the first of every
    pair before the second of any.
    """
    wrong = table[table["label"] != table["predicted"]].sort_values("confidence", ascending=False, kind="stable")
    place = wrong.groupby(["label", "predicted"]).cumcount()
    rows = wrong.loc[place.sort_values(kind="stable").index[:limit]]
    return list(rows.sort_values("confidence", ascending=False, kind="stable").index)


def _least_confident(table: pd.DataFrame) -> list[Hashable]:
    rows = table[table["confidence"].notna() & (table["label"] == table["predicted"])]
    rows = rows.sort_values("confidence", kind="stable")
    return list(rows[rows.groupby("label").cumcount() < _CORRECT].index)


def _named_examples(sources: Sources, name: str) -> list[Hashable]:
    table = sources.table(name)
    ids = (int(number) for number in table.numbers("example_id"))
    return list(zip(table.text("split"), ids, strict=True))


def _limit(sources: Sources) -> int:
    height, width = sources.info.image_shape
    return min(max(_PIXELS // (height * width), _FEWEST), _MOST)


def _scored(sources: Sources) -> pd.DataFrame:
    """Return a row for each example of all splits; predictions on the test split are those of the evaluation."""
    scores = sources.scores.set_index(["split", "example_id"]).rename(columns={"grad_norm": "norm"})
    test = sources.predictions.assign(split="test").set_index(["split", "example_id"])
    scores.loc[test.index, "predicted"] = test["predicted"]
    return scores.assign(confidence=test["probability"])


def _example(row: dict, groups: tuple[str, ...], split: Split, position: int) -> Example:
    names = ("example_id", "label", "predicted", "true_label")
    return Example(
        split=row["split"],
        **{name: int(row[name]) for name in names},
        groups=groups,
        scores={name: float(row[name]) for name in SCORES if np.isfinite(row[name])},
        png=_png(split.images[position]),
    )


def _png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(_DARK - image).save(stream, "PNG", compress_level=9)
    return stream.getvalue()
