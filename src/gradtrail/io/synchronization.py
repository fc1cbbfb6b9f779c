"""Bring MLflow's store up to date with `dvc.lock`: every state there has its row, and each training row its headlines.

Where DVC skips or restores a stage, none of our code runs; this closes that gap. A row that was lost, or never written
because the store was out of reach, is made again from the outs. What cannot be had from them (times, system metrics,
checkpoints) is absent, and the row carries the tag `rebuilt`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtrail.io.identity import Identity, locked_identities

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What was done.

    Attributes:
        present: stages whose row was there, be it under another training that wrote the same bytes.
        rebuilt: stages whose row was made.
        absent: stages without a row, whose outs are not in the workspace: `dvc checkout` brings them.
    """

    present: tuple[str, ...]
    rebuilt: tuple[str, ...]
    absent: tuple[str, ...]

    def describe(self) -> str:
        """Say it in one line."""
        parts = [f"{len(self.present)} rows present"]
        parts += [f"rebuilt: {', '.join(self.rebuilt)}"] if self.rebuilt else []
        parts += [f"outs not here: {', '.join(self.absent)}; `dvc checkout`, then again"] if self.absent else []
        return "; ".join(parts)


def sync() -> SyncReport:
    """Give every state in `dvc.lock` its row."""
    from gradtrail.io.rows import find_row, find_twin, is_whole, tie
    from gradtrail.io.store import open_store

    client = open_store()
    outcomes: dict[str, list[str]] = {"present": [], "rebuilt": [], "absent": []}
    for stage in locked_identities():
        row = find_row(client, state=stage.state)
        whole = row if row and is_whole(row) else find_twin(client, stage)
        outcome = "present" if whole else "rebuilt" if stage.has_outs_of_lock(stage.name) else "absent"
        if outcome == "rebuilt":
            _rebuild(client, stage)
        if whole:
            tie(client, whole)
        outcomes[outcome].append(stage.name)
    return SyncReport(**{name: tuple(stages) for name, stages in outcomes.items()})


def _rebuild(client: "MlflowClient", stage: Identity) -> None:
    from gradtrail.io.rows import REBUILT, open_row

    stored = open_row(client, stage)
    stored.log_outs(stage)
    stored.set_tags({REBUILT: "true"})
    client.set_terminated(stored.run_id, "FINISHED")
