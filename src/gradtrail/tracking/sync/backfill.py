"""Backfills MLflow's store: finds the states without a run, and rebuilds their runs from the outputs.

The store is searched once, at the beginning; later only changed runs are queried again.
"""

import dataclasses
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run, RunTag

from gradtrail.stages.common.dvc_cache import is_here, restore
from gradtrail.stages.common.pipeline_file import TRAIN, locked_entry, output_digests, sha256_of
from gradtrail.support.errors import UserError
from gradtrail.tracking.journal import is_referenced
from gradtrail.tracking.lineage.environment import machine_key
from gradtrail.tracking.lineage.keys import state_key
from gradtrail.tracking.lineage.recorded import consistent_stages, read_run_cache, recorded_states
from gradtrail.tracking.lineage.snapshots import Experiment, Snapshot, snapshot_of
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.logger import log_journals
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.links import PARENT, copy_headlines, has_headlines, training_of
from gradtrail.tracking.mlflow.models import EXPORT, log_export, logged_exports
from gradtrail.tracking.mlflow.naming import NOTE, note, summary_in
from gradtrail.tracking.mlflow.relocate import own_database
from gradtrail.tracking.mlflow.search import RunIndex, find_equivalent_run, is_finished_or_live
from gradtrail.tracking.mlflow.stored_run import (
    REBUILT,
    REPLACED,
    Execution,
    close_dead_runs,
    find_own_run,
    open_run,
    remove_run,
)
from gradtrail.tracking.mlflow.tags import is_of_this_host, outputs, process_tags
from gradtrail.tracking.sync.origin import origin_of
from gradtrail.tracking.sync.report import SyncReport

DUPLICATE, MISRECORDED = "duplicate_of", "misrecorded_as"  # tags: of a run, of states
SETTLING_SECONDS = 120  # longest time from a run's end until DVC has recorded the state
RECORDING_SECONDS = 60  # usual time from a run's end until DVC has recorded the state
Result = tuple[str, str]


def backfill() -> tuple[SyncReport, list[str] | None]:
    """Rebuild missing runs, link children to their parents, and copy headline metrics to trainings.

    Returns:
        The report; and the open runs of other hosts, or None while a process of this host works on a run, as the report
        will then soon be outdated.
    """
    client = open_store()
    if logged := log_journals():
        print(f"completed from their journals: {', '.join(logged)}")
    index = RunIndex(client)
    dead, still_open = close_dead_runs(client, index.runs())
    index.refresh(run.info.run_id for run in dead)
    num_duplicates = _remove_duplicates(client, index)
    recorded = recorded_states()
    states = States(client, index)
    trainings = [states.ensure_runs(snapshot) for snapshot in recorded.snapshots]
    states.rename_experiments(recorded.snapshots, trainings)
    absent = states.absent  # without the run-cache, which may have entries of discarded outputs
    states.remove_unrecorded()
    cached = [states.ensure_runs(snapshot) for snapshot in recorded.only_in_run_cache(states.is_known)]
    states.link_children()
    states.copy_headlines(trainings, cached)
    elsewhere = [run for run in still_open if not is_of_this_host(run.data.tags)]
    report = SyncReport(
        present=len(index.runs()) - len(states.rebuilt),
        rebuilt=dict(Counter(states.rebuilt.values())),
        absent=len(absent - states.run_ids.keys()),
        unreadable=recorded.num_unreadable + len(states.unreadable),
        killed=len(dead),
        duplicates=num_duplicates,
        contradicted=states.num_contradicted,
        elsewhere=len(elsewhere),
    )
    return report, [run.info.run_id for run in elsewhere] if len(elsewhere) == len(still_open) else None


def backfill_experiment(experiment: Experiment) -> None:
    """Rebuild the missing runs of one experiment from files in DVC's cache."""
    if (snapshot := snapshot_of(experiment.commit)) is None:
        return
    client = open_store()
    index = RunIndex(client)
    dead, _ = close_dead_runs(client, index.runs())
    index.refresh(run.info.run_id for run in dead)
    states = States(client, index)
    states.copy_headlines([states.ensure_runs(dataclasses.replace(snapshot, experiment=experiment))], [])


class States:
    """The recorded states and their runs.

    Args:
        client: Client of the store.
        index: Index of its runs.
    """

    def __init__(self, client: MlflowClient, index: RunIndex):
        self.run_ids: dict[Result, str] = {}  # result → run that represents it, its own or an equivalent one
        self.rebuilt: dict[str, str] = {}  # rebuilt run → stage
        self.absent: frozenset[Result] = frozenset()  # results without a run, whose files are missing
        self.unreadable: set[str] = set()  # states whose files cannot be read
        self.num_contradicted = 0  # deleted rebuilt runs, because an execution of their state wrote other outputs
        self._client = client
        self._index = index
        self._models: set[tuple[str, str]] | None = None
        self._states = {run.data.tags.get("state") for run in index.runs() if is_finished_or_live(run)}

    def is_known(self, state: str) -> bool:
        """Whether a state is recorded or has a run."""
        return state in self._states

    def ensure_runs(self, snapshot: Snapshot) -> dict[str, str]:
        """Find the run of each state of a snapshot, or rebuild it if its files are there.

        Returns:
            Stage → its run.
        """
        run_ids = {}
        for stage in consistent_stages(snapshot):
            self._states.add(stage.state)
            if not self._is_disproved(stage) and (run_id := self._run_id(stage)):
                run_ids[stage.name] = self.run_ids[_result_of(stage)] = run_id
            if EXPORT in stage.spec.outs and stage.name in run_ids and TRAIN in run_ids:
                self._ensure_model(stage, self._index[run_ids[TRAIN]])
        return run_ids

    def rename_experiments(self, snapshots: Iterable[Snapshot], runs: Iterable[Mapping[str, str]]) -> None:
        """Update the names of runs' experiments after `dvc exp rename`, which changes no run.

        A run whose experiment was removed keeps the name, unless another experiment has its state.

        Args:
            snapshots: Recorded snapshots, oldest first.
            runs: Mappings stage → run, one for each snapshot.
        """
        experiments: dict[str, list[Experiment]] = defaultdict(list)
        for snapshot, by_stage in zip(snapshots, runs, strict=True):
            if snapshot.experiment:
                for run_id in by_stage.values():
                    experiments[run_id].append(snapshot.experiment)
        for run_id, candidates in experiments.items():
            data = self._index[run_id].data
            if data.tags.get("dvc.exp_name") not in (None, *(one.name for one in candidates)):
                tags = candidates[0].tags
                words = note(run_id, data.tags | tags, data.params, data.metrics, summary_in(data.tags.get(NOTE, "")))
                self._client.log_batch(run_id, tags=[RunTag(*pair) for pair in (tags | {NOTE: words}).items()])
                self._index.refresh([run_id])

    def remove_unrecorded(self) -> None:
        """Delete the rebuilt runs of recorded states whose outputs are not recorded any more.

        One type of machine gives a state one result. A rebuilt run does not name its machine, and counts as of the same
        type. The run of an execution is never deleted. Only in this repository's own database: in another one, another
        clone's lock may name the runs. Runs that have just ended stay, as DVC may not have recorded them yet.
        """
        if own_database(self._client.tracking_uri) is None:
            return
        settled = (time.time() - SETTLING_SECONDS) * 1000
        recorded = {state: run_id for (state, _), run_id in self.run_ids.items()}
        for run in self._index.runs():
            replacement = recorded.get(run.data.tags.get("state", ""))
            is_settled = run.info.status == "FINISHED" and run.info.end_time < settled
            is_unrecorded = REBUILT in run.data.tags and run.info.run_id not in self.run_ids.values()
            if replacement and is_settled and is_unrecorded:
                self._remove_contradicted(run, replacement)

    def link_children(self) -> None:
        """Make each run below training a child of its training's run, if there is one."""
        for run in self._index.runs():
            is_linked = run.data.tags.get(PARENT) in self._index
            if not is_linked and (parent := training_of(run.data.tags, self._index)):
                self._set_parent(run, parent.info.run_id)

    def copy_headlines(self, trainings: Iterable[dict[str, str]], only_in_run_cache: Iterable[dict[str, str]]) -> None:
        """Copy the headline metrics of children to their trainings; of several children of a stage, the last one's.

        Args:
            trainings: Mappings stage → run, one for each recorded snapshot, oldest first, the working folder's last.
            only_in_run_cache: Mappings for the run-cache, used if no recorded snapshot has such a child.
        """
        chosen = {pair: child for runs in trainings for pair, child in _pairs(runs, self._index)}
        for runs in only_in_run_cache:
            for (train, stage), child in _pairs(runs, self._index):
                if not has_headlines(self._index[train], stage):
                    chosen.setdefault((train, stage), child)
        for (train, _), child in chosen.items():
            if PARENT not in self._index[child].data.tags:
                self._set_parent(self._index[child], train)
            if copy_headlines(self._client, self._index[child], self._index[train]):
                self._index.refresh([train])

    def _run_id(self, stage: Identity) -> str | None:
        if run_id := self.run_ids.get(_result_of(stage)):
            return run_id
        run = find_equivalent_run(self._index, stage)
        return run.info.run_id if run else self._rebuild(stage)

    def _is_disproved(self, stage: Identity) -> bool:
        """Whether executions here show that a record is wrong; if so, warn once, and delete its entry and rebuilt run.

        A file that is edited after a stage's last check, and before DVC reads it, is recorded as if the stage had read
        or written it. Such a record has the outputs of an execution of another state, or other outputs than the
        execution of its own state; and both executions are known, or DVC wrote the record instead of the known one's.
        """
        outs = stage.out_digests()
        executions = [run for run in self._executed[stage.name] if run.data.tags["state"] == stage.state]
        makers = [run for run in self._executed[stage.name] if run not in executions and outputs(run.data.tags) == outs]
        if not (executions or makers) or any(outputs(run.data.tags) == outs for run in executions):
            return False
        entries = self._entries_of(stage.name, stage.state, outs)
        late = [run for run in (*makers, *executions) if self._is_recorded_as_other(run, entries)]
        maker = self._index[(late or makers or executions)[0].info.run_id]
        states = maker.data.tags.get(MISRECORDED, "").split()
        if not (late or (executions and makers) or stage.state in states):
            return False
        for entry in entries:  # else DVC would restore these outputs for the new inputs
            entry.unlink(missing_ok=True)
            del self._run_cache[entry]
        for run in self._index({"state": stage.state}):
            if REBUILT in run.data.tags and outputs(run.data.tags) == outs:
                self._remove_contradicted(run, maker.info.run_id)
        if stage.state not in states:
            self._client.set_tag(maker.info.run_id, MISRECORDED, " ".join([*states, stage.state]))
            self._index.refresh([maker.info.run_id])
            print(
                f"warning: {stage.name}, state {stage.state[:12]}: {_source_of(stage)} contradicts run "
                f"{maker.info.run_name}, because files were edited as that ended; the run stays, and "
                f"`dvc repro --force {stage.name}` corrects the record",
                file=sys.stderr,
            )
        return True

    def _is_recorded_as_other(self, run: Run, entries: Iterable[Path]) -> bool:
        """Whether DVC wrote one of these entries right after the end of a run, and none for the run's own state."""
        tags, ended = run.data.tags, run.info.end_time / 1000
        own_entries = self._entries_of(tags["stage"], tags["state"], outputs(tags))
        is_late = any(0 <= entry.stat().st_mtime - ended < RECORDING_SECONDS for entry in entries)
        return is_late and not any(entry.stat().st_mtime >= ended for entry in own_entries)

    def _entries_of(self, stage: str, state: str, outs: Mapping[str, str]) -> list[Path]:
        """Return the files of the run-cache that record these outputs of a state."""
        same_outs = {entry: section for entry, section in self._run_cache.items() if output_digests(section) == outs}
        return [entry for entry, section in same_outs.items() if state_key(stage, locked_entry(section)) == state]

    @cached_property
    def _run_cache(self) -> dict[Path, dict[str, Any]]:
        return read_run_cache()

    @cached_property
    def _executed(self) -> dict[str, list[Run]]:
        """The finished executions on this type of machine, by stage; a sync deletes none of their runs."""
        runs: dict[str, list[Run]] = defaultdict(list)
        for run in self._index.runs():
            if _is_executed_here(run):
                runs[run.data.tags["stage"]].append(run)
        return runs

    def _remove_contradicted(self, run: Run, by: str) -> None:
        remove_run(self._client, run, REPLACED, by=by)
        self._index.drop(run.info.run_id)
        self.num_contradicted += 1

    def _rebuild(self, stage: Identity) -> str | None:
        if f"results/metrics/{stage.name}.json" not in stage.out_digests():  # a commit from before this layout
            return None
        with tempfile.TemporaryDirectory() as name:
            place = Path(name).resolve()
            commit = stage.snapshot.commit if stage.snapshot else ""
            if not all(
                is_here(out, md5) if is_referenced(stage, out) else restore(out, md5, place, commit)
                for out, md5 in stage.out_digests().items()
            ):
                self.absent |= {_result_of(stage)}
                return None
            run_id = _rebuild_run(self._client, dataclasses.replace(stage, place=place))
        if run_id is None:
            self.unreadable.add(stage.state)
            return None
        self._index.refresh([run_id])
        self.rebuilt[run_id] = stage.name
        for run in self._index({"state": stage.state}):
            if outputs(run.data.tags) and _is_executed_here(run):
                print(
                    f"warning: {stage.name}, state {stage.state[:12]}: {_source_of(stage)} records other outputs than "
                    "its execution here wrote; both have a run, the record's with the tag `rebuilt`",
                    file=sys.stderr,
                )
            elif not outputs(run.data.tags) and run.data.tags.get("machine") == machine_key():
                remove_run(self._client, run, DUPLICATE, by=run_id)
                self._index.drop(run.info.run_id)
        return run_id

    def _ensure_model(self, stage: Identity, train: Run) -> None:
        """Log an export as a model of its training's run, if its files are there."""
        out = stage.out_digests()[EXPORT]
        model = train.info.run_id, out
        if self._models is None:
            self._models = logged_exports(self._client, train.info.experiment_id)
        if model in self._models:
            return
        self._models.add(model)
        with tempfile.TemporaryDirectory() as name:
            place, commit = Path(name).resolve(), stage.snapshot.commit if stage.snapshot else ""
            if not restore(EXPORT, out, place, commit):
                return
            try:
                log_export(self._client, train, place / EXPORT)
            except UserError as error:  # it has the layout of another version
                print(
                    f"warning: {stage.name}, state {stage.state[:12]}: its export is not logged ({error})",
                    file=sys.stderr,
                )

    def _set_parent(self, child: Run, train_id: str) -> None:
        self._client.set_tag(child.info.run_id, PARENT, train_id)
        self._index.refresh([child.info.run_id])


def _is_executed_here(run: Run) -> bool:
    """Whether a run is of a finished execution on this type of machine."""
    is_executed = run.info.status == "FINISHED" and REBUILT not in run.data.tags
    return is_executed and run.data.tags.get("machine") == machine_key()


def _source_of(stage: Identity) -> str:
    """Return the name of the record of a state."""
    snapshot = stage.snapshot
    if snapshot and snapshot.experiment:
        return f"experiment {snapshot.experiment.name}"
    return f"dvc.lock of commit {snapshot.commit[:7]}" if snapshot and snapshot.commit else "dvc.lock or the run-cache"


def _rebuild_run(client: MlflowClient, stage: Identity) -> str | None:
    """Rebuild the run of a state from its files; if they cannot be read, print why, leave no run and return None.

    Files of other code may have another form; their readers raise UserError. Other exceptions are bugs or store faults.
    """
    began = find_own_run(client, stage, None)  # another process may have created it meanwhile
    if began and is_finished_or_live(began):
        return str(began.info.run_id)
    stored, execution = None, Execution(tags=process_tags() | origin_of(stage))
    try:
        stored = open_run(client, stage, execution)
        stored.describe(stage, execution)
        stored.log_outs(stage, stage.out_digests())
    except UserError as error:
        print(f"warning: {stage.name}, state {stage.state[:12]}: no run can be rebuilt ({error})", file=sys.stderr)
        if stored and began:
            client.set_terminated(stored.run_id, began.info.status)
        elif stored:
            client.set_terminated(stored.run_id, "FAILED")
            remove_run(client, client.get_run(stored.run_id), REPLACED, by="none: its files cannot be read")
        return None
    stored.set_tags({REBUILT: "true"})
    client.set_terminated(stored.run_id, "FINISHED")
    return stored.run_id


def _remove_duplicates(client: MlflowClient, index: RunIndex) -> int:
    """Delete all runs of a result but the oldest finished one; MLflow keeps deleted runs until `gradtrail gc`.

    In a local database a result cannot get two, as the store's lock is held while a run is created; on a server that
    several clones write to it can. Open runs stay.
    """
    by_state: dict[str, list[Run]] = defaultdict(list)
    for run in reversed(index.runs()):
        if "state" in run.data.tags:
            by_state[run.data.tags["state"]].append(run)
    removed = 0
    for runs in by_state.values():
        remaining: dict[frozenset[tuple[str, str]], Run] = {}
        for run in sorted(runs, key=lambda run: (run.info.status != "FINISHED", REBUILT in run.data.tags)):
            outs = frozenset(outputs(run.data.tags).items())
            machine = run.data.tags.get("machine")
            alike = [one for one in remaining.values() if one.data.tags.get("machine", machine) == machine]
            same = alike[0] if alike and not outs else remaining.setdefault(outs, run)
            if run is not same and run.info.status != "RUNNING":
                remove_run(client, run, DUPLICATE, by=same.info.run_id)
                index.drop(run.info.run_id)
                removed += 1
    return removed


def _result_of(stage: Identity) -> Result:
    """Return the state of a stage and a digest of its outputs: other types of machine may have made others."""
    return stage.state, sha256_of(stage.out_digests())


def _pairs(runs: dict[str, str], index: RunIndex) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((run of the training, child's stage), child's run)."""
    if train := runs.get(TRAIN):
        yield from (((train, stage), run) for stage, run in runs.items() if "train_state" in index[run].data.tags)
