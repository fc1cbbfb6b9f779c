"""Backfills MLflow's store: finds the states without a run, and rebuilds their runs from the outputs.

A rebuilt run has the tag `rebuilt`, and lacks what is not in the outputs: times, system metrics, metrics of compiling,
Orbax checkpoints and `git.diff`. The store is searched once, at the beginning; later only changed runs are queried.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from gradtrail.core.names import NETWORKS
from gradtrail.stages.common.dvc_cache import is_here, restore
from gradtrail.stages.common.environment import COMMON, has_common_bytes
from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.params import active_params
from gradtrail.stages.common.pipeline_file import TRAIN, Entry, dvc_target, is_code, is_source, sha256_of
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.paths import private_folder
from gradtrail.tracking.artifacts import read_artifact
from gradtrail.tracking.deleted import find_deleted_runs, note_deleted
from gradtrail.tracking.dvc_history import consistent_stages, recorded_origin, recorded_states, snapshot_of
from gradtrail.tracking.environment import machine_key
from gradtrail.tracking.links import copy_headlines, training_of
from gradtrail.tracking.models import log_export, logged_exports, registered_models
from gradtrail.tracking.record import new_record, take_notices
from gradtrail.tracking.registry_history import keep_registry
from gradtrail.tracking.render import EXPORT, LINEAGE, add_outs, describe, is_referenced
from gradtrail.tracking.run_cache import only_in_run_cache
from gradtrail.tracking.runs import RunIndex, find_equivalent_run, is_finished_or_live, result_test
from gradtrail.tracking.ship import Shipment, close_dead_runs, find_own_run, remove_run
from gradtrail.tracking.shipper import ship_records
from gradtrail.tracking.state import Experiment, RecordedState, Snapshot
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import (
    BYTES,
    CLONE,
    EXPORT_OUT,
    PARENT,
    REBUILT,
    SHARED,
    clone_id,
    flat_params,
    is_of_this_host,
    outputs,
    param_text,
    process_tags,
    stage_params,
)
from gradtrail.tracking.ui_view import color_trainings
from gradtrail.tracking.variants import update_parents

Result = tuple[str, str]  # state, digest of its outputs: other types of machine may have made others


def backfill() -> tuple[dict[str, int], bool]:
    """Rebuild missing runs, link children to their parents, and copy headline metrics to trainings.

    Returns:
        The report; and whether no process of this host works on a run.
    """
    client = open_store()
    num_completed = len(ship_records())
    for notice in take_notices():
        print(notice, file=sys.stderr)
    states, recorded = States(client), recorded_states()
    states.remove_duplicates()
    trainings = [states.ensure_runs(snapshot) for snapshot in recorded.snapshots]
    _warn_of_misrecorded(states.misrecorded, recorded.snapshots[-1:])
    # Without those that only the run-cache has, which may be discarded
    of_records = {"absent": states.counts["absent"], "misrecorded": len(states.misrecorded)}
    cached = only_in_run_cache(recorded.snapshots, states.known.__contains__)
    discardable = [states.ensure_runs(snapshot) for snapshot in cached]
    states.link_children()
    states.copy_headlines([*discardable, *trainings])  # those of recorded states last
    update_parents(client, states.index.runs())
    color_trainings(client, states.index.runs())
    keep_registry(client)
    num_elsewhere = sum(not is_of_this_host(run.data.tags) for run in states.still_open)
    num_runs = sum("state" in run.data.tags for run in states.index.runs())
    states.counts.update(completed=num_completed, unreadable=recorded.num_unreadable, elsewhere=num_elsewhere)
    report = {**states.counts, **of_records, "present": num_runs - states.rebuilt.total(), **states.rebuilt}
    return report, num_elsewhere == len(states.still_open)


def backfill_experiment(experiment: Experiment) -> None:
    """Rebuild the missing runs of one experiment from files in DVC's cache."""
    if snapshot := snapshot_of(experiment.commit):
        client = open_store()
        states = States(client)
        states.copy_headlines([states.ensure_runs(dataclasses.replace(snapshot, experiment=experiment))])
        update_parents(client, states.index.runs())


class States:
    """The recorded states and their runs; runs of dead processes are closed first."""

    def __init__(self, client: MlflowClient):
        self.index = RunIndex(client)
        dead, self.still_open = close_dead_runs(client, self.index.runs())
        self.index.refresh(run.info.run_id for run in dead)
        self._deleted_runs = find_deleted_runs(client)
        self._deleted = note_deleted(self._deleted_runs, self.index.runs())
        self.known = {run.data.tags.get("state", "") for run in self.index.runs() if is_finished_or_live(run)}
        self.rebuilt: Counter[str] = Counter()  # stage → number of rebuilt runs
        # More of the report; see `sync.describe`
        self.counts = Counter(killed=sum(not outputs(run.data.tags) for run in dead))
        self.misrecorded: dict[str, str] = {}  # state that is recorded for outputs of another → warning
        self._run_ids: dict[Result, str | None] = {}  # result → run that represents it, its own or an equivalent one
        self._client = client

    def remove_duplicates(self) -> None:
        """Delete all runs of a result but one: the oldest execution, or else the oldest rebuilt run.

        In a store that several clones write to, a result can get two; of those that MLflow's registry needs, all stay.
        Closed runs without outputs are replaced by an execution that finished on the same type of machine.
        """
        remaining: dict[tuple[object, ...], Run] = {}
        registered = registered_models(self._client)

        def place(run: Run) -> tuple[bool, ...]:
            return not is_finished_or_live(run), run.info.run_id not in registered, REBUILT in run.data.tags

        runs = [run for run in reversed(self.index.runs()) if run.info.status != "RUNNING" and "state" in run.data.tags]
        for run in sorted(runs, key=place):
            tags, outs = run.data.tags, outputs(run.data.tags)
            machine = tags["state"], tags.get(BYTES)
            same = run if outs else remaining.get(machine, run)
            if is_finished_or_live(run):
                same = remaining.setdefault((tags["state"], frozenset(outs.items())), run)
                if REBUILT not in tags:
                    remaining.setdefault(machine, same)
            if same is not run:
                self._replace(run, same.info.run_id)

    def ensure_runs(self, snapshot: Snapshot) -> dict[str, str]:
        """Find the run of each state of a snapshot, or rebuild it if its files are there; return stage → run."""
        run_ids, has_training = {}, False
        for stage in consistent_stages(snapshot):
            self.known.add(stage.state)
            result = stage.state, sha256_of(stage.out_digests())
            if result not in self._run_ids:
                self._run_ids[result] = self._run_id(stage, has_training=has_training)
            if run_id := self._run_ids[result]:
                run_ids[stage.name] = run_id
            if stage.name == TRAIN:
                has_training = run_id is not None or self._is_deleted(stage)
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
        """Copy the headline metrics of children to their trainings, by stage → run of each snapshot; the last wins."""
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

    def _other_maker(self, stage: RecordedState, *, has_training: bool) -> tuple[Run, str] | None:
        """Return the execution that wrote a record's outputs for other inputs, and what differs; None if there is none.

        `dvc freeze`, `dvc exp save` and `dvc commit --force` record outputs for params and deps that never made them,
        and so does an edit after a stage's last check. An execution of the state itself proves the record.
        """
        executions = self._executed.get(sha256_of(stage.out_digests()), [])
        if any(run.data.tags["state"] == stage.state for run in executions):
            return None
        recorded, has_own_network = stage.entry(stage.name), stage_params(stage).get("train.model") == "own"
        ignored = [] if has_own_network else [NETWORKS.as_posix()]
        if executions:  # data without a copy here prove nothing: weights of other code may give the same outs
            ignored += [dep for dep, md5 in recorded.deps.items() if not (is_code(dep) or is_here(dep, md5))]
        prefix = f"{TRAIN}." if has_training and stage.name != TRAIN else None
        entries = [_entry_of(self._client, run.info.run_id, stage.name) for run in executions]
        differences = [difference(recorded, entry, ignored, prefix) for entry in entries]
        return (executions[0], differences[0]) if executions and all(differences) else None

    @cached_property
    def _executed(self) -> dict[str, list[Run]]:
        """The finished executions by the digest of their outputs."""
        executed = defaultdict(list)
        for run in [*self.index.runs(), *self._deleted_runs]:
            if run.info.status == "FINISHED" and REBUILT not in run.data.tags and (outs := outputs(run.data.tags)):
                executed[sha256_of(outs)].append(run)
        return executed

    def _run_id(self, stage: RecordedState, *, has_training: bool) -> str | None:
        if maker := self._other_maker(stage, has_training=has_training):
            run, words = maker
            for rebuilt in self.index({"state": stage.state}):
                if REBUILT in rebuilt.data.tags and outputs(rebuilt.data.tags) == stage.out_digests():
                    self._replace(rebuilt, run.info.run_id)
            command = f"dvc repro --force --single-item {dvc_target(stage.name)}"
            remedy = f"it has no run; `{command}` executes it, after `dvc unfreeze` if it is frozen"
            writer = f"run {run.info.run_name} ({run.info.run_id[:8]}) wrote these outputs"
            self.misrecorded[stage.state] = _line(stage, f"{writer} {words}; {remedy}")
            return None
        if run := find_equivalent_run(self.index, stage):
            if run.data.tags.get(CLONE, SHARED) not in (SHARED, clone_id()):  # `gradtrail gc` of its clone spares it
                self._set_tag(run.info.run_id, CLONE, SHARED)
            return str(run.info.run_id)
        if self._is_deleted(stage):
            self.counts["deleted"] += 1
            return None
        return self._rebuild(stage)

    def _is_deleted(self, stage: RecordedState) -> bool:
        """Whether a person deleted the run that represented a recorded result."""
        deleted, is_same = [one for one in self._deleted if one.stage == stage.name], result_test(stage)
        result = stage.state, stage.out_digests()
        return any((one.state, one.outs) == result or is_same(one.params, one.outs) for one in deleted)

    def _rebuild(self, stage: RecordedState) -> str | None:
        """Rebuild the run of a state; return None if its files are missing or, as those of other code, not readable."""
        outs = stage.out_digests()
        if f"results/metrics/{stage.name}.json" not in outs:  # another layout
            return None
        with tempfile.TemporaryDirectory() as name:
            place = Path(name).resolve() / "outs"
            if not all(
                is_here(out, md5) if is_referenced(stage, out) else restore(out, md5, place, stage.commit)
                for out, md5 in outs.items()
            ):
                self.counts["absent"] += 1
                return None
            stage = dataclasses.replace(stage, place=place)
            record = new_record(stage.state, Path(name) / "record")
            try:
                info = describe(record, stage, process_tags() | recorded_origin(stage))
                info = add_outs(record, info, stage, outs)
            except (UserError, OSError, ValueError, LookupError, TypeError) as error:  # outputs of other code
                _warn(stage, f"no run can be rebuilt ({type(error).__name__}: {one_line(error)[:200]})")
                self.counts["unreadable"] += 1
                return None
            began = find_own_run(self._client, info)  # another process may have created it meanwhile
            if began and is_finished_or_live(began):
                self.index.refresh([began.info.run_id])
                return str(began.info.run_id)
            record.write(dataclasses.replace(info, ended=time.time()))
            shipment = Shipment(self._client, record)
            shipment.advance()
        self.index.refresh([shipment.run_id])
        self.rebuilt[stage.name] += 1
        own_bytes = (machine_key(), *[COMMON] * has_common_bytes())
        tags = [run.data.tags for run in self.index({"state": stage.state}, finished=True)]
        if any(tag.get(BYTES) in own_bytes and REBUILT not in tag for tag in tags):
            _warn(stage, "records other outputs than its execution here wrote; both have a run")
        return shipment.run_id

    def _ensure_model(self, stage: RecordedState, train: Run) -> None:
        """Log an export as a model of its training's run, if its files are there."""
        md5 = stage.out_digests()[EXPORT]
        if (train.info.run_id, md5) in self._models:
            return
        self._models.add((train.info.run_id, md5))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            try:
                if restore(EXPORT, md5, folder, stage.commit):
                    log_export(self._client, train, folder / EXPORT)
            except UserError as error:  # other code wrote it
                _warn(stage, f"its export is not logged ({error})")

    @cached_property
    def _models(self) -> set[tuple[str, str]]:
        """The run of the training, and the digest of the output `models/export`, of each complete model."""
        return {(model.source_run_id, model.tags[EXPORT_OUT]) for model in logged_exports(self._client)}

    def _replace(self, run: Run, by: str) -> None:
        """Delete a run, which MLflow keeps until `gradtrail gc`, with a tag that names the run in its place."""
        if remove_run(self._client, run.info.run_id, by=by):
            del self.index[run.info.run_id]
            self.counts["replaced"] += 1

    def _set_tag(self, run_id: str, key: str, value: str) -> None:
        self._client.set_tag(run_id, key, value)
        self.index.refresh([run_id])


@functools.cache
def _entry_of(client: MlflowClient, run_id: str, stage: str) -> Entry:
    """Return what determined the outputs of a run; an empty entry if its artifact is missing or damaged."""
    with contextlib.suppress(ValueError, LookupError):
        entry = json.loads(read_artifact(client, run_id, LINEAGE))[stage]
        return Entry(cmd="", params=entry["params"], deps=entry["deps"])
    return Entry(cmd="", params={}, deps={})


def difference(recorded: Entry, made: Entry, ignored: Sequence[str] = (), prefix: str | None = None) -> str:
    """Return the first param or dep in which a record and an execution differ, code and packages aside; or empty.

    Equal outputs of other code or packages are normal, such as in a commit that was pulled, and so is what only one of
    them has: it came or went with the code. `ignored` data deps have no effect; params with a `prefix` are of another
    stage, whose own record shows that they are right.
    """
    new, old = (active_params(flat_params(entry)) for entry in (recorded, made))
    for key, value in new.items():
        if old.get(key, value) != value and not (prefix and key.startswith(prefix)):
            return f"with {key} {param_text(old[key])}, not {param_text(value)}"
    for dep, md5 in recorded.deps.items():
        if made.deps.get(dep, md5) != md5 and not (is_source(dep) or dep in ignored):
            return f"from another {dep}"
    return ""


def _warn_of_misrecorded(lines: Mapping[str, str], working: Sequence[Snapshot]) -> None:
    """Print the warnings, by state: of the working folder's states always, of others once."""
    place = private_folder() / "warned.json"
    warned: set[str] = set()
    with contextlib.suppress(OSError, ValueError):
        warned = {*json.loads(place.read_bytes())["states"]}
    current = {stage.state for snapshot in working if not snapshot.commit for stage in consistent_stages(snapshot)}
    for line in (line for state, line in lines.items() if state not in warned - current):
        print(line, file=sys.stderr)
    if lines:
        write_json(place, {"states": sorted(warned | lines.keys())})


def _warn(stage: RecordedState, message: str) -> None:
    print(_line(stage, message), file=sys.stderr)


def _line(stage: RecordedState, message: str) -> str:
    record = f"commit {stage.commit[:7]}" if stage.commit else "dvc.lock or the run-cache"
    if experiment := stage.snapshot.experiment:
        record = f"experiment {experiment.name}"
    return f"warning: {stage.name}, state {stage.state[:12]} of {record}: {message}"
