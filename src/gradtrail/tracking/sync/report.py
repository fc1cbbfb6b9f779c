"""What a sync of MLflow's store did, as one line."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What a sync did.

    Attributes:
        present: runs that the store had before, and still has.
        rebuilt: stage → how many runs were rebuilt.
        absent: states without a run, whose files are neither in DVC's cache nor in the working folder.
        unreadable: commits whose `dvc.yaml` or `dvc.lock`, and states whose files, cannot be read.
        killed: runs that were open although their process on this host no longer exists.
        duplicates: runs that were deleted, because their state has another one.
        contradicted: rebuilt runs that were deleted, because an execution or a record of their state has other outs.
        elsewhere: runs that are open, with a process on another host.
    """

    present: int
    rebuilt: Mapping[str, int]
    absent: int
    unreadable: int = 0
    killed: int = 0
    duplicates: int = 0
    contradicted: int = 0
    elsewhere: int = 0

    @property
    def afterwards(self) -> "SyncReport":
        """The report of the next sync, if nothing changes."""
        present = self.present + sum(self.rebuilt.values())
        return dataclasses.replace(self, present=present, rebuilt={}, killed=0, duplicates=0, contradicted=0)

    def describe(self, *, verbose: bool = False) -> str:
        """Return the report as one line; states whose files are missing, as in a fresh clone, only if `verbose`."""
        made = [name if count == 1 else f"{name} ({count})" for name, count in self.rebuilt.items()]
        advice = "`dvc checkout dvc.yaml`, or `dvc fetch --all-commits` with a remote, then sync again"
        parts = {
            f"{self.present} runs present": True,
            f"rebuilt: {', '.join(made)}": self.rebuilt,
            f"states whose files are not here: {self.absent}; {advice}": verbose and self.absent,
            f"skipped, not readable: {self.unreadable}": self.unreadable,
            f"closed, as their processes no longer exist: {self.killed}": self.killed,
            f"deleted as duplicates: {self.duplicates}": self.duplicates,
            f"deleted, as their state has other outs: {self.contradicted}": self.contradicted,
            f"open on other hosts: {self.elsewhere}": self.elsewhere,
        }
        return "; ".join(part for part, is_so in parts.items() if is_so)
