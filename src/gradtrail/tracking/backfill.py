"""Backfills MLflow's store: finds the states without a run, and rebuilds their runs from the outputs.

A rebuilt run has the tag `rebuilt`, and lacks what is not in the outputs: times, system metrics, metrics of compiling,
Orbax checkpoints and `git.diff`. The store is searched once, at the beginning; later only changed runs are queried.
"""

import dataclasses
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from gradtrail.stages.common.dvc_cache import is_here, restore
from gradtrail.stages.common.pipeline_file import TRAIN, locked_entry, output_digests, sha256_of
from gradtrail.support.errors import UserError
from gradtrail.tracking.lineage.environment import machine_key
from gradtrail.tracking.lineage.recorded import (
    Section,
    consistent_stages,
    recorded_origin,
    recorded_states,
    run_cache_entries,
    snapshot_of,
)
from gradtrail.tracking.lineage.state import Experiment, Identity, Snapshot, state_key
from gradtrail.tracking.mlflow.client import experiment_id, open_store
from gradtrail.tracking.mlflow.links import PARENT, copy_headlines, training_of
from gradtrail.tracking.mlflow.models import EXPORT, log_export, logged_exports
from gradtrail.tracking.mlflow.search import RunIndex, find_equivalent_run, is_finished_or_live
from gradtrail.tracking.mlflow.stored_run import (
    REBUILT,
    REPLACED,
    close_dead_runs,
    find_own_run,
    is_referenced,
    open_run,
    remove_run,
)
from gradtrail.tracking.mlflow.tags import is_of_this_host, outputs

MISRECORDED = "misrecorded_as"  # tag of a run: states that DVC recorded for its outputs by mistake
RECORDING_SECONDS = 60  # usual time from a run's end until DVC has recorded the state
Result = tuple[str, str]  # state, digest of its outputs: other types of machine may have made others


def backfill() -> tuple[dict[str, int], list[str] | None]:
    """Rebuild missing runs, link children to their parents, and copy headline metrics to trainings.

    Returns:
        The report; and the open runs of other hosts, or None while a process of this host works on a run, as the report
        will then soon be outdated.
    """
    client = open_store()
    # What stages logged in vain belongs here: before the runs are read, and states without a run are rebuilt
    states = States(client)
    states.remove_duplicates()
    recorded = recorded_states()
    trainings = [states.ensure_runs(snapshot) for snapshot in recorded.snapshots]
    num_absent = len(states.absent - states.run_ids.keys())  # without the run-cache, which may have discarded outputs
    cached = [states.ensure_runs(snapshot) for snapshot in recorded.only_in_run_cache(states.known.__contains__)]
    states.link_children()
    states.copy_headlines([*cached, *trainings])  # those of recorded states last
    elsewhere = [run for run in states.still_open if not is_of_this_host(run.data.tags)]
    counts = {
        "absent": num_absent,
        "unreadable": recorded.num_unreadable + len(states.unreadable),
        "killed": states.num_killed,
        "replaced": states.num_replaced,
        "elsewhere": len(elsewhere),
    }
    report = {"present": len(states.index.runs()) - states.rebuilt.total()} | states.rebuilt
    report |= {key: count for key, count in counts.items() if count}
    return report, [run.info.run_id for run in elsewhere] if len(elsewhere) == len(states.still_open) else None


def backfill_experiment(experiment: Experiment) -> None:
    """Rebuild the missing runs of one experiment from files in DVC's cache."""
    if snapshot := snapshot_of(experiment.commit):
        states = States(open_store())
        states.copy_headlines([states.ensure_runs(dataclasses.replace(snapshot, experiment=experiment))])


class States:
    """The recorded states and their runs; runs of dead processes are closed first."""

    def __init__(self, client: MlflowClient):
        self.index = RunIndex(client)
        dead, self.still_open = close_dead_runs(client, self.index.runs())
        self.index.refresh(run.info.run_id for run in dead)
        self.known = {run.data.tags.get("state", "") for run in self.index.runs() if is_finished_or_live(run)}
        self.run_ids: dict[Result, str] = {}  # result → run that represents it, its own or an equivalent one
        self.absent: set[Result] = set()  # results without a run, whose files are missing
        self.unreadable: set[str] = set()  # states whose files cannot be read
        self.rebuilt: Counter[str] = Counter()  # stage → number of rebuilt runs
        self.num_killed, self.num_replaced = len(dead), 0
        self._client = client

    def remove_duplicates(self) -> None:
        """Delete all runs of a result but one: the oldest execution, or else the oldest rebuilt run.

        In a local database a result cannot get two, as the store's lock is held while a run is created; on a server
        that several clones write to it can. Open runs stay.
        """
        remaining: dict[tuple[object, ...], Run] = {}
        finished = [run for run in reversed(self.index.runs()) if run.info.status == "FINISHED"]
        for run in sorted(finished, key=lambda run: REBUILT in run.data.tags):
            tags = run.data.tags
            result = (tags.get("state"), frozenset(outputs(tags).items()))
            if "state" in tags and (same := remaining.setdefault(result, run)) is not run:
                self._replace(run, same.info.run_id)

    def ensure_runs(self, snapshot: Snapshot) -> dict[str, str]:
        """Find the run of each state of a snapshot, or rebuild it if its files are there.

        Returns:
            Stage → its run.
        """
        run_ids = {}
        for stage in consistent_stages(snapshot):
            result = stage.state, sha256_of(stage.out_digests())
            self.known.add(stage.state)
            if result not in self.run_ids and not self._is_misrecorded(stage):
                run = find_equivalent_run(self.index, stage)
                if run_id := run.info.run_id if run else self._rebuild(stage, result):
                    self.run_ids[result] = run_id
            if result in self.run_ids:
                run_ids[stage.name] = self.run_ids[result]
            if EXPORT in stage.spec.outs and stage.name in run_ids and TRAIN in run_ids:
                self._ensure_model(stage, self.index[run_ids[TRAIN]])
        return run_ids

    def link_children(self) -> None:
        """Make each run below training a child of its training's run, if there is one."""
        for run in self.index.runs():
            is_linked = run.data.tags.get(PARENT) in self.index
            if not is_linked and (parent := training_of(run.data.tags, self.index)):
                self._set_tag(run.info.run_id, PARENT, parent.info.run_id)

    def copy_headlines(self, snapshots: Iterable[Mapping[str, str]]) -> None:
        """Copy the headline metrics of children to their trainings; of several children of a stage, the last one's.

        Args:
            snapshots: Mappings stage → run, one for each snapshot.
        """
        chosen: dict[tuple[str, str], str] = {}
        for runs in snapshots:
            for stage, child in runs.items():
                if TRAIN in runs and "train_state" in self.index[child].data.tags:
                    chosen[runs[TRAIN], stage] = child
        for (train, _), child in chosen.items():
            if PARENT not in self.index[child].data.tags:
                self._set_tag(child, PARENT, train)
            if copy_headlines(self._client, self.index[child], self.index[train]):
                self.index.refresh([train])

    def _is_misrecorded(self, stage: Identity) -> bool:
        """Whether executions here show that a record is wrong; if so, warn once, and delete its entry and rebuilt run.

        A file that is edited after a stage's last check, and before DVC reads it, is recorded as if the stage had read
        or written it. Such a record has the outputs of an execution of another state, or other outputs than the
        execution of its own state; and both executions are known, or DVC wrote the record instead of the known one's.
        """
        outs = stage.out_digests()
        own = self._executed.get(stage.state, [])
        makers = [run for run in self._executed.get(sha256_of(outs), []) if run not in own]
        if not (own or makers) or any(outputs(run.data.tags) == outs for run in own):
            return False
        entries = self._entries_of(stage.name, stage.state, outs)
        late = [run for run in (*makers, *own) if self._was_recorded_as(run, entries)]
        run = self.index[(late or makers or own)[0].info.run_id]
        states = run.data.tags.get(MISRECORDED, "").split()
        if not (late or (own and makers) or stage.state in states):
            return False
        for entry in entries:  # else DVC would restore these outputs for the new inputs
            entry.unlink()
        for rebuilt in self.index({"state": stage.state}):
            if REBUILT in rebuilt.data.tags and outputs(rebuilt.data.tags) == outs:
                self._replace(rebuilt, run.info.run_id)
        if stage.state not in states:
            self._set_tag(run.info.run_id, MISRECORDED, " ".join([*states, stage.state]))
            _warn(
                stage,
                f"{_source_of(stage)} contradicts run {run.info.run_name}, because files were edited as that ended; "
                f"the run stays, and `dvc repro --force {stage.name}` corrects the record",
            )
        return True

    def _was_recorded_as(self, run: Run, entries: Iterable[Path]) -> bool:
        """Whether DVC wrote one of these entries right after the end of a run, and none for the run's own state."""
        tags, ended = run.data.tags, run.info.end_time / 1000
        own_entries = self._entries_of(tags["stage"], tags["state"], outputs(tags))
        is_late = any(0 <= entry.stat().st_mtime - ended < RECORDING_SECONDS for entry in entries)
        return is_late and not any(entry.stat().st_mtime >= ended for entry in own_entries)

    def _entries_of(self, stage: str, state: str, outs: Mapping[str, str]) -> list[Path]:
        """Return the files of the run-cache that record these outputs of a state."""
        same_outs = [(path, section) for path, section in self._entries.get(sha256_of(outs), []) if path.exists()]
        return [path for path, section in same_outs if state_key(stage, locked_entry(section)) == state]

    @cached_property
    def _entries(self) -> dict[str, list[tuple[Path, Section]]]:
        """The entries of the run-cache, by the digest of their outputs."""
        entries = defaultdict(list)
        for path, section in run_cache_entries().items():
            entries[sha256_of(output_digests(section))].append((path, section))
        return entries

    @cached_property
    def _executed(self) -> dict[str, list[Run]]:
        """The finished executions on this type of machine, by state and by the digest of their outputs."""
        executed = defaultdict(list)
        for run in self.index({"machine": machine_key()}, finished=True):
            if REBUILT not in run.data.tags and (outs := outputs(run.data.tags)):
                executed[run.data.tags["state"]].append(run)
                executed[sha256_of(outs)].append(run)
        return executed

    def _rebuild(self, stage: Identity, result: Result) -> str | None:
        """Rebuild the run of a state; return None if its files are missing, or cannot be read."""
        outs, commit = stage.out_digests(), stage.snapshot.commit if stage.snapshot else ""
        if f"results/metrics/{stage.name}.json" not in outs:  # another layout
            return None
        with tempfile.TemporaryDirectory() as name:
            place = Path(name).resolve()
            if not all(
                is_here(out, md5) if is_referenced(stage, out) else restore(out, md5, place, commit)
                for out, md5 in outs.items()
            ):
                self.absent.add(result)
                return None
            run_id = self._rebuild_from_files(dataclasses.replace(stage, place=place))
        if run_id and stage.state in self._executed:
            _warn(
                stage,
                f"{_source_of(stage)} records other outputs than its execution here wrote; both have a run, the "
                "record's with the tag `rebuilt`",
            )
        return run_id

    def _rebuild_from_files(self, stage: Identity) -> str | None:
        """Rebuild a run; if the files cannot be read, as those of other code, print why and mark it as FAILED."""
        began = find_own_run(self._client, stage, is_live=False)  # another process may have created it meanwhile
        if began and is_finished_or_live(began):
            self.index.refresh([began.info.run_id])
            return str(began.info.run_id)
        stored = None
        try:
            stored = open_run(self._client, stage, recorded_origin(stage))
            stored.log_outs(stage)
        except UserError as error:
            _warn(stage, f"no run can be rebuilt ({error})")
            self.unreadable.add(stage.state)
            if stored:
                self._client.set_terminated(stored.run_id, "FAILED")
            return None
        stored.set_tags({REBUILT: "true"})
        self._client.set_terminated(stored.run_id, "FINISHED")
        self.index.refresh([stored.run_id])
        self.rebuilt[stage.name] += 1
        return stored.run_id

    def _ensure_model(self, stage: Identity, train: Run) -> None:
        """Log an export as a model of its training's run, if its files are there."""
        model = train.info.run_id, stage.out_digests()[EXPORT]
        if model in self._models:
            return
        self._models.add(model)
        with tempfile.TemporaryDirectory() as name:
            place, commit = Path(name).resolve(), stage.snapshot.commit if stage.snapshot else ""
            try:
                if restore(EXPORT, model[1], place, commit):
                    log_export(self._client, train, place / EXPORT)
            except UserError as error:  # other code wrote it
                _warn(stage, f"its export is not logged ({error})")

    @cached_property
    def _models(self) -> set[tuple[str, str]]:
        """The logged exports: run of the training, digest of the export."""
        return logged_exports(self._client, experiment_id(self._client, "models"))

    def _replace(self, run: Run, by: str) -> None:
        """Delete a run, which MLflow keeps until `gradtrail gc`, with a tag that names the run in its place."""
        remove_run(self._client, run, REPLACED, by=by)
        self.index.drop(run.info.run_id)
        self.num_replaced += 1

    def _set_tag(self, run_id: str, key: str, value: str) -> None:
        self._client.set_tag(run_id, key, value)
        self.index.refresh([run_id])


def _source_of(stage: Identity) -> str:
    """Return the name of the record of a state."""
    snapshot = stage.snapshot
    if snapshot and snapshot.experiment:
        return f"experiment {snapshot.experiment.name}"
    return f"dvc.lock of commit {snapshot.commit[:7]}" if snapshot and snapshot.commit else "dvc.lock or the run-cache"


def _warn(stage: Identity, message: str) -> None:
    print(f"warning: {stage.name}, state {stage.state[:12]}: {message}", file=sys.stderr)
