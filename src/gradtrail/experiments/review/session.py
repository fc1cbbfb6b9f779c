"""A review: the suspects, the decisions about them in the file of corrections, and what the page shows of both."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from gradtrail.core.data import Split
from gradtrail.experiments.review.suspects import Suspect
from gradtrail.stages.preprocess.corrections import (
    Correction,
    check_text,
    disagreements,
    read_corrections,
    write_corrections,
)
from gradtrail.support.errors import UserError

Example = tuple[bool, int]


class Decisions:
    """The file of corrections, read and written for every decision: it is the only state.

    Args:
        path: File of corrections; the first decision creates it.
        lock: Path of the lock that all writers of the file share.
    """

    def __init__(self, path: Path, lock: Path):
        self.path = path
        self._lock = FileLock(lock)
        self._undo: list[tuple[Correction, Correction | None]] = []  # decisions and what they replaced

    def read(self) -> dict[Example, Correction]:
        """Return the decisions in the file."""
        return {row.example: row for row in read_corrections(self.path)} if self.path.exists() else {}

    def record(self, row: Correction) -> dict[Example, Correction]:
        """Write a decision, in place of an earlier one about the same example; return all decisions.

        Raises:
            UserError: Another reviewer decided it differently, or the file is damaged.
        """
        with self._lock:
            rows = self.read()
            before = rows.get(row.example)
            if before and before.reviewer != row.reviewer and (differing := disagreements([before, row])):
                raise UserError(
                    f"{self.path}: {differing[0]}; the decision of {before.reviewer} is kept; use another --file"
                )
            write_corrections(self.path, (rows := rows | {row.example: row}).values())
            self._undo.append((row, before))
            return rows

    def undo(self) -> tuple[Example, dict[Example, Correction]] | None:
        """Undo this process's last decision; return its example and all decisions, or None if none is left.

        Raises:
            UserError: The decision was changed elsewhere since and is not undone, or the file is damaged.
        """
        with self._lock:
            if not self._undo:
                return None
            written, before = self._undo[-1]
            rows = self.read()
            if rows.pop(written.example, None) != written:
                self._undo.pop()
                raise UserError(
                    f"{self.path}: {written} was changed elsewhere since and is not undone; reload the page"
                )
            if before:
                rows[written.example] = before
            write_corrections(self.path, rows.values())
            self._undo.pop()
            return written.example, rows


@dataclass(frozen=True, kw_only=True)
class Review:
    """The answers of the server, as plain data for JSON."""

    suspects: Sequence[Suspect]  # in the order of the review
    train: Split  # split that the neighbours are rows of
    decisions: Decisions  # decisions about these suspects and any other examples
    probabilities: Mapping[Example, float]  # probability that the label is wrong, of every scored example
    class_names: Sequence[str]
    title: str  # title of the data set
    reviewer: str
    now: Callable[[], str]  # returns the time in UTC

    def state(self) -> dict[str, Any]:
        """Return all suspects without their images, and the progress."""
        rows = self.decisions.read()
        return {
            "title": self.title,
            "reviewer": self.reviewer,
            "file": str(self.decisions.path),
            "classes": list(self.class_names),
            "items": [self._item(suspect, rows) for suspect in self.suspects],
            "progress": self._progress(rows),
        }

    def images(self, index: int) -> dict[str, Any]:
        """Return the image of a suspect and its neighbours with their labels, pixels in base64, row by row."""
        suspect = self._suspect(index)
        near = [
            {
                "id": int(self.train.example_id[row]),
                "label": int(self.train.labels[row]),
                "pixels": _encoded(self.train.images[row]),
            }
            for row in suspect.neighbours
        ]
        height, width = suspect.image.shape
        return {"height": height, "width": width, "pixels": _encoded(suspect.image), "neighbours": near}

    def decide(self, index: int, new: int | None, reason: str) -> dict[str, Any]:
        """Write a decision to the file.

        Args:
            index: Index of the suspect.
            new: Right class; the given one to keep it, None if it is unclear.
            reason: A note.

        Returns:
            The changed item and the progress.

        Raises:
            UserError: The index, the class or the reason is invalid, another reviewer decided differently, or the file
                is damaged.
        """
        suspect = self._suspect(index)
        if new is not None and not 0 <= new < len(self.class_names):
            raise UserError(f"new must be 0 to {len(self.class_names) - 1} or null, got {new}")
        row = Correction(
            split=suspect.split,
            example_id=suspect.example_id,
            old=suspect.label,
            new=new,
            reviewer=self.reviewer,
            time=self.now(),
            reason=check_text("reason", reason),
        )
        return self._changed(index, self.decisions.record(row))

    def undo(self) -> dict[str, Any]:
        """Undo the last decision; return the changed item, with `index` None if there is nothing to undo."""
        if (undone := self.decisions.undo()) is None:
            return {"index": None}
        example, rows = undone
        index = next(place for place, suspect in enumerate(self.suspects) if suspect.example == example)
        return self._changed(index, rows)

    def summary(self) -> str:
        """Return the progress in a line."""
        progress = self._progress(self.decisions.read())
        return (
            f"{progress['decided']} of {progress['total']} labels reviewed: {progress['corrected']} corrected, "
            f"{progress['unclear']} unclear; {self.decisions.path} has the decisions"
        )

    def _suspect(self, index: int) -> Suspect:
        if not 0 <= index < len(self.suspects):
            raise UserError(f"index must be 0 to {len(self.suspects) - 1}, got {index}")
        return self.suspects[index]

    def _changed(self, index: int, rows: Mapping[Example, Correction]) -> dict[str, Any]:
        return {"index": index, "item": self._item(self.suspects[index], rows), "progress": self._progress(rows)}

    def _item(self, suspect: Suspect, rows: Mapping[Example, Correction]) -> dict[str, Any]:
        row = rows.get(suspect.example)
        return {
            "split": suspect.split,
            "id": suspect.example_id,
            "label": suspect.label,
            "proposed": suspect.proposed_label,
            "probability": suspect.proposed_probability,
            "wrong": suspect.probability_wrong,
            "decided": row is not None,
            "new": row.new if row else None,
            "reason": row.reason if row else "",
            "reviewer": row.reviewer if row else "",
        }

    def _progress(self, rows: Mapping[Example, Correction]) -> dict[str, Any]:
        decided = [rows[suspect.example] for suspect in self.suspects if suspect.example in rows]
        return {
            "total": len(self.suspects),
            "decided": len(decided),
            "corrected": sum(row.changes for row in decided),
            "unclear": sum(row.new is None for row in decided),
            "expected_left": sum(value for example, value in self.probabilities.items() if example not in rows),
        }


def _encoded(image: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(image).tobytes()).decode()
