"""The file of corrections, `pipeline/corrections.csv`: decisions about labels and examples, and their application.

A row is a decision about one example. `gradtrail review` writes the file, and a person may edit it; spreadsheets damage
such files, so that every value is checked.
"""

import csv
import io
import re
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
LONGEST_TEXT = 200
DROP: Literal["drop"] = "drop"  # in the column `new`: the example is left out of the training split
_SHOWN = 5  # most examples in an error
_UNPRINTED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


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


def check_text(name: str, text: str) -> str:
    """Return a text for the file, without space around it; raise UserError if the file may not contain it."""
    text = text.strip()
    if len(text) > LONGEST_TEXT or _UNPRINTED.search(text):
        raise UserError(f"{name} must be one line of at most {LONGEST_TEXT} characters, got {one_line(text)[:50]!r}")
    if text.startswith(("=", "+", "-", "@")):
        raise UserError(f"{name} begins with {text[0]!r}, which a spreadsheet would run as a formula: {text[:50]!r}")
    return text


def read_corrections(path: Path) -> list[Correction]:
    """Read a file of corrections: UTF-8, with or without a byte order mark, any line ends.

    Raises:
        UserError: one line that names the file, the line or the examples, what was found, and what is allowed.
    """
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; without corrections it holds the line {','.join(COLUMNS)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save it as comma-separated UTF-8") from None

    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if tuple(header) != COLUMNS:
            line = one_line(",".join(header))[:100]
            raise UserError(f"{path}: the first line is {line!r}; expected {','.join(COLUMNS)}, separated by commas")
        rows = [_parse(row, f"{path}: line {reader.line_num}") for row in reader if any(row)]
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: not readable as CSV: {one_line(error)}") from None

    # One decision for each example.
    if conflicts := disagreements(rows):
        raise UserError(f"{path}: conflicting decisions, none is applied: {'; '.join(conflicts[:_SHOWN])}")
    last_rows = {row.example: row for row in rows}
    if repeated := [row for row in rows if last_rows[row.example] is not row]:
        raise UserError(f"{path}: {repeated[0]} is listed twice; keep one line for each example")
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
    values = dict(zip(COLUMNS, row, strict=True))
    if values["split"] not in SPLITS:
        raise UserError(f"{place}: split must be one of {', '.join(SPLITS)}, got {values['split'][:50]!r}")
    for name in ("example_id", "old", "new"):
        if not re.fullmatch(r"[0-9]{1,9}", values[name]) and not (name == "new" and values[name] in ("", DROP)):
            empty = f", {DROP}, or empty if it cannot be decided" if name == "new" else ""
            raise UserError(f"{place}: {name} must be digits only{empty}; got {values[name][:50]!r}")
    reviewer, time, reason = (check_text(f"{place}: {name}", values[name]) for name in ("reviewer", "time", "reason"))
    example_id, old = int(values["example_id"]), int(values["old"])
    new: int | Literal["drop"] | None = None
    if values["new"]:
        new = DROP if values["new"] == DROP else int(values["new"])
    if new == DROP and values["split"] == "test":
        raise UserError(f"{place}: a test example cannot be dropped, or accuracies could not be compared")
    return Correction(
        split=values["split"], example_id=example_id, old=old, new=new, reviewer=reviewer, time=time, reason=reason
    )
