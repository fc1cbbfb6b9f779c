"""The labels to look at: the most suspicious first, with their images, and those that are most like them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factories import NUM_CLASSES
from reviewing import random_splits
from stage_results import suspects_table

from gradtrail.experiments.review.suspects import choose_suspects, nearest, read_suspects
from gradtrail.support.errors import UserError

SPLITS = random_splits()
TABLE = suspects_table(SPLITS)


def read(folder: Path, table: pd.DataFrame) -> pd.DataFrame:
    table.to_parquet(folder / "a.parquet", index=False)
    return read_suspects(folder / "a.parquet")


def test_suspects_are_the_rows_with_the_highest_scores(tmp_path: Path) -> None:
    shuffled = TABLE.sample(frac=1, random_state=0)
    chosen = choose_suspects(read(tmp_path, shuffled), SPLITS, limit=12, num_neighbours=3)
    best = TABLE[::-1].head(12)
    assert [(one.split, one.example_id) for one in chosen] == [*zip(best["split"], best["example_id"], strict=True)]
    for one in chosen:
        place = np.flatnonzero(SPLITS[one.split].example_id == one.example_id)[0]
        np.testing.assert_array_equal(one.image, SPLITS[one.split].images[place])
        assert one.label == SPLITS[one.split].given_labels[place]
        assert one.proposed_label == (one.label + 1) % NUM_CLASSES


@pytest.mark.parametrize("count", [1, 5, 100])
@pytest.mark.parametrize("size", [3, 5000])  # more than are compared at a time
def test_neighbours_equal_those_of_a_brute_force_search(size: int, count: int) -> None:
    rng = np.random.default_rng(0)
    among = rng.integers(0, 256, (size, 4, 3), dtype=np.uint8)
    chosen = np.array([0, 2])
    images = np.concatenate([among[chosen], rng.integers(0, 256, (2, 4, 3), dtype=np.uint8)])
    rows = nearest(images, among, np.array([0, 2, -1, -1]), count)
    assert rows.shape == (4, min(count, size - 1))
    distances = np.sum((images[:, None].astype(np.float64) - among) ** 2, axis=(2, 3))
    distances[0, 0] = distances[1, 2] = np.inf
    np.testing.assert_allclose(
        np.take_along_axis(distances, rows, axis=1), np.sort(distances, axis=1)[:, : rows.shape[1]], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"example_id": 10**6}, r"data/processed has no \w+ 1000000; run `make audit` again$"),
        ({"label": (TABLE["label"] + 1) % NUM_CLASSES}, r"has label \d, in data/processed \d; run `make audit`$"),
    ],
)
def test_audit_of_other_data_is_one_line(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_suspects(read(tmp_path, TABLE.assign(**changed)), SPLITS, limit=3, num_neighbours=3)
