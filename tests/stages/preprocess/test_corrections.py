"""The file of corrections: it round-trips, is refused in one line if it is damaged, and corrects labels."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import NUM_CLASSES, preprocess_config
from fuzzing import fuzz, refusal
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.data import Split, prepare
from gradtrail.stages.preprocess.corrections import (
    COLUMNS,
    DROP,
    PATH,
    Correction,
    apply_corrections,
    read_corrections,
    write_corrections,
)
from gradtrail.support.errors import UserError

SIZES = {"train": 60, "test": 20}
HEADER = ",".join(COLUMNS)


def correction(**overrides: Any) -> Correction:
    row = Correction(split="train", example_id=7, old=1, new=2, reviewer="Ann", time="2026-01-02T03:04:05Z", reason="")
    return dataclasses.replace(row, **overrides)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=20)
ROWS = st.lists(
    st.builds(
        correction,
        split=st.sampled_from(["train", "validation", "test"]),
        example_id=st.integers(0, 10**9 - 1),
        old=st.integers(0, 255),
        new=st.none() | st.integers(0, 255),
        reviewer=TEXTS,
        reason=TEXTS,
    ),
    unique_by=lambda row: row.example,
)


@fuzz(50)
@given(rows=ROWS)
def test_corrections_round_trip_with_equal_bytes(tmp_path: Path, rows: list[Correction]) -> None:
    write_corrections(tmp_path / "a.csv", rows)
    write_corrections(tmp_path / "b.csv", reversed(rows))
    assert {row.example: row for row in read_corrections(tmp_path / "a.csv")} == {row.example: row for row in rows}
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    write_corrections(tmp_path / "c.csv", read_corrections(tmp_path / "a.csv"))
    assert (tmp_path / "c.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()


def test_review_leaves_the_committed_file_as_it_is(tmp_path: Path) -> None:
    committed = Path(__file__).parents[3] / PATH
    write_corrections(tmp_path / "a.csv", read_corrections(committed))
    assert (tmp_path / "a.csv").read_bytes() == committed.read_bytes()


ROW = "train,7,1,2,Ann,2026-01-02,"


@pytest.mark.parametrize(
    "text",
    [
        f"{HEADER}\n{ROW}",  # without an end of the last line
        f"\ufeff{HEADER}\r\n{ROW}\r\n",  # byte order mark and line ends of a spreadsheet
        f"{HEADER}\n\n{ROW}\n,,,,,,\n",  # empty lines
        ",".join(f'"{name}"' for name in COLUMNS) + "\n" + ",".join(f'"{value}"' for value in ROW.split(",")),
    ],
)
def test_forms_of_csv_that_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8", newline="")
    assert read_corrections(tmp_path / "a.csv") == [correction(time="2026-01-02")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the first line is ''; expected split,example_id,"),
        (ROW, "the first line is 'train,7,1,2,Ann,2026-01-02,'; expected split,example_id,"),
        (
            f"{HEADER}\n{ROW}".replace(",", ";"),
            "the first line is 'split;example_id;old;new;reviewer;time;reason'; expected ",
        ),
        (f"{HEADER}\n{ROW}".encode("utf-16"), "not readable as CSV in UTF-8: "),
        (f"{HEADER}\ntrain,7,1,2", "line 2: 4 values, expected 7"),
        (f"{HEADER}\n{ROW}\nTrain,8,1,2,,,", "line 3: split must be one of train, validation, test, got 'Train'"),
        (f"{HEADER}\ntrain,1.234,1,2,,,", "line 2: example_id, old and new must be digits; new may be drop, or "),
        (f"{HEADER}\ntrain,7,1,two,,,", "line 2: example_id, old and new must be digits"),
        (f"{HEADER}\ntest,7,1,drop,,,", "line 2: a test example cannot be dropped"),
        (
            f"{HEADER}\n{ROW}\ntest,7,1,2,,,\ntrain,7,1,3,Ben,,\ntrain,8,1,1,Ann,,\nvalidation,8,1,,Ben,,",
            "conflicting decisions, none is applied: train 7: Ann says 1 → 2, Ben says 1 → 3; "
            "train 8: Ann says 1 is right, Ben says it cannot be told",
        ),
    ],
)
def test_invalid_corrections_are_refused_in_one_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert str(refusal(lambda: read_corrections(path))).startswith(f"{path}: {message}")


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    line = f"{tmp_path}/a.csv: no such file; without corrections it holds the line {HEADER}"
    assert refusal(lambda: read_corrections(tmp_path / "a.csv")) == line


# Applied to splits.


def splits_of(label_noise: float = 0.0, subset_fraction: float = 1.0) -> dict[str, Split]:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60, 4, 3), dtype=np.uint8), rng.integers(0, 3, 60, dtype=np.uint8)
    config = preprocess_config(subset_fraction=subset_fraction, label_noise=label_noise, corrections=True)
    return prepare(images, labels, images[:20], labels[:20], config, num_classes=NUM_CLASSES)


def applied(splits: dict[str, Split], rows: Sequence[Correction]) -> dict[str, Split]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_corrections(Path("a.csv"), rows)
        return apply_corrections(splits, True, SIZES, NUM_CLASSES, Path("a.csv"))


def wrong(split: str, labelled: Split, places: Sequence[int]) -> list[Correction]:
    """Corrections of some examples to the next class."""
    return [
        correction(
            split=split,
            example_id=int(labelled.example_id[place]),
            old=int(labelled.labels[place]),
            new=int(labelled.labels[place] + 1) % NUM_CLASSES,
        )
        for place in places
    ]


def test_corrections_change_labels_but_not_given_test_labels() -> None:
    splits = splits_of()
    rows = [row for name, split in splits.items() for row in wrong(name, split, [0, 4])]
    unchanged = correction(split="train", example_id=int(splits["train"].example_id[1]), new=None)
    confirmed = dataclasses.replace(unchanged, old=int(splits["train"].labels[1]))
    corrected = applied(splits, [*rows, confirmed])
    for name, split in splits.items():
        expected = split.labels.copy()
        expected[[0, 4]] = (expected[[0, 4]] + 1) % NUM_CLASSES
        np.testing.assert_array_equal(corrected[name].given_labels, split.labels)
        np.testing.assert_array_equal(corrected[name].corrected_labels, expected)
        np.testing.assert_array_equal(corrected[name].labels, split.labels if name == "test" else expected)
        np.testing.assert_array_equal(corrected[name].true_labels, corrected[name].labels)
        np.testing.assert_array_equal(corrected[name].images, split.images)


def test_dropped_training_examples_are_gone_and_nothing_else_changes() -> None:
    splits = splits_of()
    dropped = [2, 5]
    rows = [
        correction(
            split=name, example_id=int(splits[name].example_id[place]), old=int(splits[name].labels[place]), new=DROP
        )
        for name, places in (("train", dropped), ("validation", [0]))
        for place in places
    ]
    remaining = applied(splits, rows)
    expected = {**splits, "train": splits["train"][np.delete(np.arange(len(splits["train"])), dropped)]}
    for name, split in expected.items():
        for field in dataclasses.fields(Split):
            np.testing.assert_array_equal(getattr(remaining[name], field.name), getattr(split, field.name))


def test_planted_noise_comes_first_and_corrections_undo_it() -> None:
    splits = splits_of(label_noise=0.4)
    train = splits["train"]
    planted = np.flatnonzero(train.labels != train.true_labels)
    assert len(planted) == 18
    rows = [
        correction(example_id=int(train.example_id[i]), old=int(train.labels[i]), new=int(train.true_labels[i]))
        for i in planted[:10]
    ]
    corrected = applied(splits, rows)["train"]
    np.testing.assert_array_equal(corrected.true_labels, train.true_labels)
    np.testing.assert_array_equal(np.flatnonzero(corrected.labels != corrected.true_labels), planted[10:])
    with pytest.raises(UserError, match=r"^a.csv: train \d+: old is \d, but the label \(after label noise\) is \d$"):
        applied(splits_of(), rows)  # made for other labels


def test_example_keeps_its_correction_in_whichever_split_another_seed_puts_it() -> None:
    splits = splits_of()
    (row,) = wrong("train", splits["validation"], [3])
    np.testing.assert_array_equal(
        np.flatnonzero(applied(splits, [row])["validation"].labels != splits["validation"].labels), [3]
    )


def test_corrections_of_examples_outside_of_a_subset_are_left_out() -> None:
    whole, part = splits_of(), splits_of(subset_fraction=0.2)
    rows = wrong("train", whole["train"], range(len(whole["train"])))
    corrected = applied(part, rows)["train"]
    assert np.all(corrected.labels != part["train"].labels)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (correction(example_id=60), "train 60: no such example, ids are 0 to 59"),
        (correction(split="test", example_id=20), "test 20: no such example, ids are 0 to 19"),
        (correction(new=3), "train 7: no class 3; classes are 0 to 2"),
        (correction(old=3, new=DROP), "train 7: no class 3; classes are 0 to 2"),
    ],
)
def test_corrections_that_do_not_fit_the_data(row: Correction, message: str) -> None:
    assert refusal(lambda: applied(splits_of(), [row])) == f"a.csv: {message}"
