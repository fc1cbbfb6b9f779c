"""What bringing MLflow's store up to date came to."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What was done.

    Attributes:
        present: rows that were there.
        rebuilt: stage → how many rows were made.
        absent: states without a row, whose files are nowhere here.
        unreadable: commits whose pipeline or lock is none, and states that no row can be made of.
        killed: rows that a process of this host had left open.
        duplicates: rows that were deleted, as there is another one of their state.
        elsewhere: rows that are open and not of this host.
    """

    present: int
    rebuilt: Mapping[str, int]
    absent: int
    unreadable: int = 0
    killed: int = 0
    duplicates: int = 0
    elsewhere: int = 0

    @property
    def afterwards(self) -> "SyncReport":
        """What there is to say while nothing changes."""
        present = self.present + sum(self.rebuilt.values())
        return dataclasses.replace(self, present=present, rebuilt={}, killed=0, duplicates=0)

    def describe(self) -> str:
        """Say it in one line."""
        made = [name if count == 1 else f"{name} ({count})" for name, count in self.rebuilt.items()]
        advice = "`dvc checkout`, or `dvc fetch --all-commits` where there is a remote, then again"
        parts = {
            f"{self.present} rows present": True,
            f"rebuilt: {', '.join(made)}": self.rebuilt,
            f"states whose files are not here: {self.absent}; {advice}": self.absent,
            f"passed over, of another shape: {self.unreadable}": self.unreadable,
            f"closed, of processes that are no more: {self.killed}": self.killed,
            f"deleted, as they repeated others: {self.duplicates}": self.duplicates,
            f"open, of other hosts: {self.elsewhere}": self.elsewhere,
        }
        return "; ".join(part for part, is_so in parts.items() if is_so)
