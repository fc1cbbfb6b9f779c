"""The rows that MLflow's store lacks: which states there are, which of them have a row, and how a row is made again.

The store is searched once, at the beginning. What is decided is decided in memory; only what is changed is asked again.
"""

import dataclasses
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError
from gradtrail.tracking.lineage.dvc_cache import is_here, restore
from gradtrail.tracking.lineage.origin import origin_of
from gradtrail.tracking.lineage.recorded import consistent_stages, recorded_snapshots
from gradtrail.tracking.lineage.snapshots import Snapshot
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.links import PARENT, copy_headlines, has_headlines
from gradtrail.tracking.mlflow.models import delete_models
from gradtrail.tracking.mlflow.search import RunIndex, find_equivalent_run, find_run, is_whole
from gradtrail.tracking.mlflow.stored_run import REBUILT, StoredRun, close_dead_runs, is_referenced, open_run
from gradtrail.tracking.mlflow.tags import is_of_this_host
from gradtrail.tracking.sync.report import SyncReport

DUPLICATE = "duplicate_of"


def backfill() -> tuple[SyncReport, list[str] | None]:
    """Give every state its row, every child its parent and every training its headlines.

    Returns:
        What was done; and the rows that stay open as they are not of this host, or None where a process of this host is
        at work, so that nobody can say how things will be.
    """
    client = open_store()
    index = RunIndex(client)
    dead, still_open = close_dead_runs(client, index.rows())
    index.refresh(row.info.run_id for row in dead)
    num_duplicates = _remove_duplicates(client, index)
    recorded = recorded_snapshots()
    found = States(client, index)
    trainings = [found.settle(snapshot) for snapshot in recorded.snapshots]
    absent = found.absent  # of the run-cache's, those that can be made: it may remember what was thrown away
    only_ran = [found.settle(snapshot) for snapshot in recorded.only_ran(found.is_known)]
    found.hang_children()
    found.show_headlines(trainings, only_ran)
    elsewhere = [row for row in still_open if not is_of_this_host(row.data.tags)]
    report = SyncReport(
        present=len({*found.run_ids.values()}) - len(found.rebuilt),
        rebuilt=dict(Counter(found.rebuilt.values())),
        absent=len(absent - found.run_ids.keys()),
        unreadable=recorded.num_unreadable + len(found.unreadable),
        killed=len(dead),
        duplicates=num_duplicates,
        elsewhere=len(elsewhere),
    )
    return report, [row.info.run_id for row in elsewhere] if len(elsewhere) == len(still_open) else None


class States:
    """The states that were found, and their rows.

    Args:
        client: of the store.
        index: its rows.

    Attributes:
        run_ids: state → its row, be it one under another training that wrote the same bytes, or of other code.
        rebuilt: row that was made → its stage.
        absent: states without a row, whose files were not found.
        unreadable: states of which no row can be made.
    """

    def __init__(self, client: MlflowClient, index: RunIndex):
        self.run_ids: dict[str, str] = {}
        self.rebuilt: dict[str, str] = {}
        self.absent: frozenset[str] = frozenset()
        self.unreadable: set[str] = set()
        self._client = client
        self._index = index
        self._entries = {row.data.tags.get("entry") for row in index.rows() if is_whole(row)}

    def is_known(self, entry: str) -> bool:
        """Whether a state with this entry was found, or has a row."""
        return entry in self._entries

    def settle(self, snapshot: Snapshot) -> dict[str, str]:
        """Give each state of a snapshot its row, if its files are there.

        Returns:
            Stage → its row.
        """
        found = {}
        for stage in consistent_stages(snapshot):
            self._entries.add(stage.entry_key)
            if run_id := self._run_id(stage):
                found[stage.name] = self.run_ids[stage.state] = run_id
        return found

    def hang_children(self) -> None:
        """Let each row below training hang on the row of its own training, where there is one."""
        trainings = {row.data.tags["state"]: row.info.run_id for row in self._index({"stage": "train"})}
        for row in self._index.rows():
            parent = trainings.get(row.data.tags.get("train_state", ""))
            if parent and row.data.tags.get(PARENT) not in self._index:
                self._hang(row, parent)

    def show_headlines(self, trainings: Iterable[dict[str, str]], only_ran: Iterable[dict[str, str]]) -> None:
        """Copy the figures of children to their trainings; where there are several children, of the last.

        Args:
            trainings: stage → row, the oldest first, the working folder's last.
            only_ran: likewise, of the run-cache, which says less of what was last.
        """
        chosen = {pair: child for rows in trainings for pair, child in _pairs(rows, self._index)}
        for rows in only_ran:
            for (train, stage), child in _pairs(rows, self._index):
                if not has_headlines(self._index[train], stage):
                    chosen.setdefault((train, stage), child)
        for (train, _), child in chosen.items():
            if PARENT not in self._index[child].data.tags:
                self._hang(self._index[child], train)
            if copy_headlines(self._client, self._index[child], self._index[train]):
                self._index.refresh([train])

    def _run_id(self, stage: Identity) -> str | None:
        if stage.state in self.run_ids:
            return self.run_ids[stage.state]
        row = find_equivalent_run(self._index, stage)
        return row.info.run_id if row else self._rebuild(stage)

    def _rebuild(self, stage: Identity) -> str | None:
        with tempfile.TemporaryDirectory() as name:
            place = Path(name).resolve()
            commit = stage.snapshot.commit if stage.snapshot else ""
            if not all(
                is_here(out, md5) if is_referenced(stage, out) else restore(out, md5, place, commit)
                for out, md5 in stage.out_digests().items()
            ):
                self.absent |= {stage.state}
                return None
            run_id = _make_row(self._client, dataclasses.replace(stage, place=place))
        if run_id is None:
            self.unreadable.add(stage.state)
            return None
        self._index.refresh([run_id])
        self.rebuilt[run_id] = stage.name
        return run_id

    def _hang(self, child: Run, train_id: str) -> None:
        self._client.set_tag(child.info.run_id, PARENT, train_id)
        self._index.refresh([child.info.run_id])


def _make_row(client: MlflowClient, stage: Identity) -> str | None:
    """Make the row of a state from its files; return None, and leave none, if they are of another shape."""
    began = find_run(client, state=stage.state)  # another process may have begun since
    if began and is_whole(began):
        return str(began.info.run_id)
    stored: StoredRun | None = None
    try:
        stored = open_run(client, stage, origin_of(stage))
        stored.log_outs(stage)
    except (LookupError, ValueError, TypeError, UserError):  # of files and params; the store's faults are others
        if stored and began:
            client.set_terminated(stored.run_id, began.info.status)
        elif stored:
            delete_models(client, client.get_run(stored.run_id))
            client.delete_run(stored.run_id)
        return None
    stored.set_tags({REBUILT: "true"})
    client.set_terminated(stored.run_id, "FINISHED")
    return stored.run_id


def _remove_duplicates(client: MlflowClient, index: RunIndex) -> int:
    """Keep one row of each state, the oldest that is finished; MLflow keeps what it deletes until `mlflow gc`.

    In a database here a state cannot get two, as whoever makes a row holds the store's lock; on a server that several
    clones write to it can. Rows that are open are left alone.
    """
    by_state: dict[str, list[Run]] = defaultdict(list)
    for row in reversed(index.rows()):
        if "state" in row.data.tags:
            by_state[row.data.tags["state"]].append(row)
    removed = 0
    for rows in by_state.values():
        kept = next((row for row in rows if row.info.status == "FINISHED"), rows[0])
        for row in rows:
            if row is not kept and row.info.status != "RUNNING":
                client.set_tag(row.info.run_id, DUPLICATE, kept.info.run_id)
                delete_models(client, row)
                client.delete_run(row.info.run_id)
                index.drop(row.info.run_id)
                removed += 1
    return removed


def _pairs(rows: dict[str, str], index: RunIndex) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield training's row and a stage below it → that stage's row."""
    if train := rows.get(TRAIN):
        yield from (((train, stage), row) for stage, row in rows.items() if "train_state" in index[row].data.tags)
