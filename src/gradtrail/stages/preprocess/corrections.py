"""The file of corrections, `pipeline/corrections.csv`: decisions about labels and examples, and their application.

A row is a decision about one example. `gradtrail review` writes the file, and a person may edit it.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from gradtrail.core.data import Split, correct
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.data.data_files import SPLITS
from gradtrail.support.errors import UserError, one_line

PATH = Path("pipeline/corrections.csv")
COLUMNS = ("split", "example_id", "old", "new", "reviewer", "time", "reason")
DROP: Literal["drop"] = "drop"  # in the column `new`: the example is left out of the training split
_SHOWN = 5  # most examples in an error


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A decision about the label of one example."""

    split: str  # split of the example; `train` and `validation` are parts of the same file of examples
    example_id: int  # position in the original file
    old: int  # given class
    new: int | Literal["drop"] | None  # correct class, `old` if the label was confirmed; None if it is undecidable
    reviewer: str
    time: str  # UTC
    reason: str  # a note; may be empty

    @property
    def example(self) -> tuple[bool, int]:
        """The key of the example: True for a test example, and its id. The seed decides between the other splits."""
        return self.split == "test", self.example_id

    @property
    def changes(self) -> bool:
        """Whether the label changes."""
        return isinstance(self.new, int) and self.new != self.old

    @property
    def verdict(self) -> str:
        """The decision in words."""
        if self.new is None:
            return "it cannot be told"
        if self.new == DROP:
            return DROP
        return f"{self.old} → {self.new}" if self.changes else f"{self.old} is right"

    def __str__(self) -> str:
        return f"{self.split} {self.example_id}"


def read_corrections(path: Path) -> list[Correction]:
    """Read a file of corrections.

    Raises:
        UserError: one line that names the file, the line or the examples, what was found, and what is allowed.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            if (header := next(reader, [])) != [*COLUMNS]:
                line = one_line(",".join(header))[:100]
                raise UserError(f"{path}: the first line is {line!r}; expected {','.join(COLUMNS)}")
            rows = [_parse(row, f"{path}: line {reader.line_num}") for row in reader if any(row)]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; without corrections it holds the line {','.join(COLUMNS)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not readable as CSV in UTF-8: {one_line(error)[:100]}") from None
    if conflicts := disagreements(rows):
        raise UserError(f"{path}: conflicting decisions, none is applied: {'; '.join(conflicts[:_SHOWN])}")
    return rows


def write_corrections(path: Path, rows: Iterable[Correction]) -> None:
    """Write a file of corrections atomically, sorted by split and example: equal decisions give equal bytes."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in sorted(rows, key=lambda row: (SPLITS.index(row.split), row.example_id)):
            writer.writerow([getattr(row, name) for name in COLUMNS])  # None is empty


def disagreements(rows: Iterable[Correction]) -> list[str]:
    """Return a line for each example that rows decide differently: `train 7: Ann says 3, Ben says 5`."""
    by_example: dict[tuple[bool, int], list[Correction]] = {}
    for row in rows:
        by_example.setdefault(row.example, []).append(row)
    return [
        f"{decisions[0]}: " + ", ".join(f"{row.reviewer} says {row.verdict}" for row in decisions)
        for decisions in by_example.values()
        if len({(row.old, row.new) for row in decisions}) > 1
    ]


def require_fit(rows: Sequence[Correction], splits: Mapping[str, Split], num_classes: int, path: Path) -> None:
    """Raise UserError unless every correction names a class, and its old label is the given one of the example.

    A subset may lack examples. Messages name the file at `path`.
    """
    labels = {
        (name == "test", number): label
        for name, split in splits.items()
        for number, label in zip(split.example_id.tolist(), split.given_labels.tolist(), strict=True)
    }
    for row in rows:
        if (largest := max(row.old, row.new if isinstance(row.new, int) else 0)) >= num_classes:
            raise UserError(f"{path}: {row}: no class {largest}; classes are 0 to {num_classes - 1}")
        if labels.get(row.example, row.old) != row.old:
            actual = labels[row.example]
            raise UserError(f"{path}: {row}: old is {row.old}, but the label (after label noise) is {actual}")


def apply_corrections(
    splits: Mapping[str, Split],
    which: Literal[True, "test"],
    sizes: Mapping[str, int],
    num_classes: int,
    path: Path = PATH,
) -> dict[str, Split]:
    """Return the splits with corrected labels and without dropped training examples.

    The test split keeps the given labels as its labels.

    Args:
        splits: splits after label noise.
        which: True for all corrections of the file, "test" for those of the test split alone.
        sizes: number of examples in the original files `train` and `test`.

    Raises:
        UserError: a correction names an unknown example or class, or its old label is not the given one.
    """
    rows = [row for row in read_corrections(path) if which is True or row.split == "test"]
    for row in rows:
        if row.example_id >= (size := sizes["test" if row.split == "test" else "train"]):
            raise UserError(f"{path}: {row}: no such example, ids are 0 to {size - 1:,}")
    require_fit(rows, splits, num_classes, path)
    corrected = {}
    for name, split in splits.items():
        new = {row.example_id: row.new for row in rows if row.changes and (row.split == "test") == (name == "test")}
        ids, labels = (np.array(list(values), np.int32) for values in (new.keys(), new.values()))
        corrected[name] = correct(split, ids, labels, is_applied=name != "test")

    train = corrected["train"]
    remaining = ~np.isin(train.example_id, [row.example_id for row in rows if row.new == DROP])
    if not remaining.any():
        raise UserError(f"{path}: all {len(train):,} training examples are dropped")
    return {**corrected, "train": train[remaining]}


def _parse(row: Sequence[str], place: str) -> Correction:
    if len(row) != len(COLUMNS):
        raise UserError(f"{place}: {len(row)} values, expected {len(COLUMNS)}")
    split, example_id, old, new, reviewer, time, reason = row
    if split not in SPLITS:
        raise UserError(f"{place}: split must be one of {', '.join(SPLITS)}, got {split[:50]!r}")
    if not (example_id.isdecimal() and old.isdecimal() and (new.isdecimal() or new in ("", DROP))):
        numbers = f"example_id, old and new must be digits; new may be {DROP}, or empty if it cannot be decided"
        raise UserError(f"{place}: {numbers}; got {','.join(row[1:4])[:50]!r}")
    if new == DROP and split == "test":
        raise UserError(f"{place}: a test example cannot be dropped, or accuracies could not be compared")
    return Correction(
        split=split,
        example_id=int(example_id),
        old=int(old),
        new=DROP if new == DROP else int(new) if new else None,
        reviewer=reviewer,
        time=time,
        reason=reason,
    )
