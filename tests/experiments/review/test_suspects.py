"""The labels to look at: the most suspicious first, with their images, and those that are most like them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factories import NUM_CLASSES
from hypothesis import given
from hypothesis import strategies as st
from reviewing import random_splits
from stage_results import suspects_table
from untrusted import damaged, fuzz, refusal

from gradtrail.experiments.review.suspects import choose_suspects, nearest, read_suspects
from gradtrail.support.errors import UserError

SPLITS = random_splits()
TABLE = suspects_table(SPLITS)


def read(folder: Path, table: pd.DataFrame) -> pd.DataFrame:
    table.to_parquet(folder / "a.parquet", index=False)
    return read_suspects(folder / "a.parquet", NUM_CLASSES)


def test_suspects_are_the_rows_of_the_highest_score_with_their_images_and_given_labels(tmp_path: Path) -> None:
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
def test_neighbours_are_those_of_a_search_by_hand(size: int, count: int) -> None:
    rng = np.random.default_rng(0)
    among = rng.integers(0, 256, (size, 4, 3), dtype=np.uint8)
    chosen = np.array([0, 2])
    images = np.concatenate([among[chosen], rng.integers(0, 256, (2, 4, 3), dtype=np.uint8)])
    found = nearest(images, among, np.array([0, 2, -1, -1]), count)
    assert found.shape == (4, min(count, size - 1))
    distances = np.sum((images[:, None].astype(np.float64) - among) ** 2, axis=(2, 3))
    distances[0, 0] = distances[1, 2] = np.inf
    np.testing.assert_allclose(
        np.take_along_axis(distances, found, axis=1), np.sort(distances, axis=1)[:, : found.shape[1]], rtol=1e-5
    )


def test_without_a_table_the_line_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"suspects.parquet: no such file; run `make audit` first, which finds the labels to look at$"
    ):
        read_suspects(tmp_path / "suspects.parquet", 3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"score": np.nan}, "score must be finite numbers, found float64"),
        ({"example_id": 1.5}, "example_id must be integers, found float64"),
        ({"label": "a"}, "label must be integers, found"),
        ({"proposed_label": 3}, "proposed_label must be 0 to 2; `make audit` makes the file anew"),
        ({"split": "dev"}, "split must be one of train, validation, test, got dev"),
    ],
)
def test_a_foreign_table_is_one_line(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, TABLE.assign(**changed))
    assert str(caught.value).startswith(f"{tmp_path / 'a.parquet'}: {said}")


def test_a_table_of_other_columns_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a table of this project"):
        read(tmp_path, TABLE.drop(columns="score"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"example_id": 10**6}, r"data/processed has no \w+ 1000000; `make audit` makes the file anew$"),
        ({"label": (TABLE["label"] + 1) % NUM_CLASSES}, r"has label \d, in data/processed \d; run `make audit`$"),
    ],
)
def test_a_table_of_other_data_is_one_line(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose_suspects(read(tmp_path, TABLE.assign(**changed)), SPLITS, limit=3, num_neighbours=3)


@fuzz(25)
@given(data=st.data())
def test_a_damaged_table_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.parquet"
    TABLE.to_parquet(path, index=False)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    refusal(lambda: read_suspects(path, NUM_CLASSES))
