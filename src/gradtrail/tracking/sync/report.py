"""The result of a sync of MLflow's store, as one line."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The numbers of runs that a sync changed and of those that it left."""

    present: int  # runs that the store had before, and still has
    rebuilt: Mapping[str, int]  # stage → number of runs
    absent: int  # states without a run, whose files are neither in DVC's cache nor in the working folder
    unreadable: int = 0  # commits whose `dvc.yaml` or `dvc.lock`, and states whose files, cannot be read
    killed: int = 0  # open runs whose process on this host no longer exists
    duplicates: int = 0  # deleted runs, because their state has another one
    contradicted: int = 0  # deleted rebuilt runs, because an execution or a record of their state has other outputs
    elsewhere: int = 0  # open runs with a process on another host

    @property
    def afterwards(self) -> "SyncReport":
        """The report of the next sync if nothing changes."""
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
            f"interrupted, marked as KILLED: {self.killed}": self.killed,
            f"deleted as duplicates: {self.duplicates}": self.duplicates,
            f"deleted, because their outputs differ from the recorded ones: {self.contradicted}": self.contradicted,
            f"open on other hosts: {self.elsewhere}": self.elsewhere,
        }
        return "; ".join(part for part, is_so in parts.items() if is_so)
