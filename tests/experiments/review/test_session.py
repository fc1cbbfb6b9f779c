"""Decisions are in the file at once and can be undone; the labels to look at, the most suspicious first."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factories import NUM_CLASSES
from reviewing import new_review, random_splits
from stage_results import suspects_table

from gradtrail.experiments.review import session
from gradtrail.experiments.review.suspects import choose_suspects, nearest, read_suspects
from gradtrail.stages.preprocess.corrections import read_corrections
from gradtrail.support.errors import UserError


def test_decision_is_in_the_file_before_the_answer(tmp_path: Path) -> None:
    review = new_review(tmp_path)
    labels = [suspect.label for suspect in review.suspects]
    review.decide(0, (labels[0] + 1) % 3, "a blot")
    review.decide(1, labels[1], "")
    answer = review.decide(2, None, "")
    assert answer["item"]["decided"]
    assert answer["item"]["new"] is None
    first, second, third = (
        next(row for row in read_corrections(tmp_path / "corrections.csv") if row.example == suspect.example)
        for suspect in review.suspects[:3]
    )
    assert (first.old, first.new, first.reason) == (labels[0], (labels[0] + 1) % 3, "a blot")
    assert (first.reviewer, first.time) == ("Ann", "2026-01-01T00:00:00Z")
    assert (second.new, third.new) == (second.old, None)
    assert answer["progress"]["expected_left"] == pytest.approx(
        sum(review.probabilities.values()) - sum(suspect.probability_wrong for suspect in review.suspects[:3])
    )
    assert review.summary().startswith("3 of 8 labels reviewed: 1 corrected, 1 unclear; ")


def test_undo_reverts_decisions_one_by_one_including_changed_ones(tmp_path: Path) -> None:
    review = new_review(tmp_path)
    label = review.suspects[0].label
    versions = [b""]
    for index, new in [(0, label), (3, None), (0, (label + 1) % 3)]:
        review.decide(index, new, "")
        versions.append((tmp_path / "corrections.csv").read_bytes())
    for expected, index in [(versions[2], 0), (versions[1], 3)]:
        assert review.undo()["index"] == index
        assert (tmp_path / "corrections.csv").read_bytes() == expected
    assert review.undo()["item"]["decided"] is False
    assert read_corrections(tmp_path / "corrections.csv") == []
    assert review.undo() == {"index": None}


def test_second_session_keeps_decisions_of_the_first(tmp_path: Path) -> None:
    new_review(tmp_path, limit=20).decide(15, None, "")
    first = new_review(tmp_path, limit=8)
    first.decide(4, 1, "")
    second = new_review(tmp_path, limit=8)
    assert [item["decided"] for item in second.state()["items"]] == [index == 4 for index in range(8)]
    assert second.undo() == {"index": None}  # what another session decided is changed, not undone
    second.decide(5, 0, "")
    assert len(read_corrections(tmp_path / "corrections.csv")) == 3


def test_undo_keeps_decisions_that_were_changed_elsewhere(tmp_path: Path) -> None:
    ours, theirs = new_review(tmp_path), new_review(tmp_path)
    for index in (0, 1):
        ours.decide(index, None, "")
    theirs.decide(1, 0, "")
    before = (tmp_path / "corrections.csv").read_bytes()
    example = f"{ours.suspects[1].split} {ours.suspects[1].example_id}"
    with pytest.raises(UserError, match=f"corrections.csv: {example} was changed elsewhere since and is not undone"):
        ours.undo()
    assert (tmp_path / "corrections.csv").read_bytes() == before
    assert ours.undo()["index"] == 0  # the one before it can still be undone


def test_decision_of_another_reviewer_is_kept(tmp_path: Path) -> None:
    new_review(tmp_path).decide(0, None, "")
    before = (tmp_path / "corrections.csv").read_bytes()
    review = new_review(tmp_path, reviewer="Ben")
    label = review.suspects[0].label
    message = (
        f": Ann says it cannot be told, Ben says {label} is right; the decision of Ann is kept; use another --file"
    )
    with pytest.raises(UserError, match=message):
        review.decide(0, label, "")
    assert (tmp_path / "corrections.csv").read_bytes() == before
    review.decide(0, None, "alike")


def test_invalid_decision_changes_nothing(tmp_path: Path) -> None:
    review = new_review(tmp_path)
    for index, new, reason in [
        (8, 0, ""),
        (-1, 0, ""),
        (0, 3, ""),
        (0, -1, ""),
        (0, 1, "=1"),
        (0, 1, "a\nb"),
        (0, 1, "a" * 201),
    ]:
        with pytest.raises(UserError):
            review.decide(index, new, reason)
    assert not (tmp_path / "corrections.csv").exists()
    (tmp_path / "corrections.csv").write_text("damaged by hand")
    with pytest.raises(UserError, match="the first line is"):
        review.decide(0, 1, "")
    assert (tmp_path / "corrections.csv").read_text() == "damaged by hand"


def test_failed_write_changes_neither_file_nor_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    review = new_review(tmp_path)
    review.decide(0, None, "")
    before = (tmp_path / "corrections.csv").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(session, "write_corrections", full)
        for change in (lambda: review.decide(1, None, ""), review.undo):
            with pytest.raises(OSError, match="No space left"):
                change()
    assert (tmp_path / "corrections.csv").read_bytes() == before
    assert review.undo()["index"] == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


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
