"""Ships a record to MLflow: opens its run, or joins that of an earlier attempt, and logs what is new until its end.

Knows no stages: which run a record belongs to follows from its state, its outputs and the type of machine.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag

from gradtrail.stages.common.files import write_json
from gradtrail.tracking.artifacts import announce_tables
from gradtrail.tracking.environment import machine_key
from gradtrail.tracking.links import link, parent_tag
from gradtrail.tracking.models import models_of, registered_models
from gradtrail.tracking.record import (
    ATTEMPT,
    FINISHED,
    KILLED,
    RUNNING,
    SHIPPED,
    BadRecordError,
    Record,
    RunInfo,
    leave_notice,
)
from gradtrail.tracking.runs import StoredRuns
from gradtrail.tracking.store import experiment_id, store_lock
from gradtrail.tracking.tags import (
    ATTEMPTS,
    BEGAN,
    BYTES,
    CONTEXT,
    PROCESS,
    REPLACED,
    clone_tag,
    is_alive,
    is_of_this_host,
    outputs,
    process_tags,
)


class Shipment:
    """The way of a record into the store.

    Raises:
        BadRecordError: the record cannot be read.
        Exception: MLflow failed, or there is a bug.
    """

    def __init__(self, client: MlflowClient, record: Record):
        self.info = record.read()
        self.record = record
        self._client = client
        self._require_intact()  # before a run is opened for it
        self._use(self._continued() or self._opened())

    def advance(self) -> bool:
        """Ship what is new; return True once the run is closed, and the record not needed any more."""
        self.info = self.record.read()
        if self.info.status == RUNNING and not is_at_work(self.info):
            self.info = dataclasses.replace(self.info, status=KILLED, ended=self.record.last_change())
        self._require_intact()
        self._ship_points()
        if self.info.status == RUNNING:
            self._ship_tags(self.info.tags)
            return False
        self._close()
        return True

    def _require_intact(self) -> None:
        if self.info.files and self.info.files != self.record.digests():
            raise BadRecordError(f"{self.record.folder}: a file differs from its digest")

    def _close(self) -> None:
        info, outs = self.info, self.info.outs or {}
        if outs and self._run_outs not in ({}, outs):  # no run mixes two results
            leave_notice(f"{info.stage}: an earlier attempt wrote other bytes; a new run replaces its run")
            replaced = self.run_id
            self._use(self._opened(is_new=True))
            self._client.set_terminated(replaced)
            remove_run(self._client, replaced, by=self.run_id)
            self._ship_points()
        # The stage has ended: from now on this process works on the run
        self._ship_tags(info.tags | process_tags())
        self._client.log_artifacts(self.run_id, str(self.record.artifacts))
        for path in sorted((self.record.folder / ATTEMPT).glob("*.json")):
            self._client.log_text(self.run_id, path.read_text(), attempt_file(path.stem, self._attempt))
        announce_tables(self._client, self.run_id, info.tables)
        for one in info.datasets:
            dataset = Dataset(one.name, one.digest, "local", json.dumps({"uri": one.uri}))
            self._client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag(CONTEXT, one.context)])])
        status = FINISHED if outs or self._run_outs else info.status  # one that any attempt finished stays finished
        self._client.set_terminated(self.run_id, status, int((info.ended or info.began) * 1000))
        if outs and self._is_only_run(outs):
            link(self._client, self.run_id, self.record)

    def _is_only_run(self, outs: Mapping[str, str]) -> bool:
        """Leave one run for the state, as two clones that share a store, or two jobs, may have made it at once.

        The older one of equal outputs stays; closed runs without outputs go. Returns whether this record's run stays.
        """
        if (kind := self.info.tags.get(BYTES)) is None:
            return True
        runs = [run for run in StoredRuns(self._client)({"state": self.info.state}) if run.info.status != RUNNING]
        older_first = [run for run in reversed(runs) if run.info.run_id != self.run_id]
        equal = [run for run in older_first if outputs(run.data.tags) == outs]
        for older in equal:
            if BYTES in older.data.tags:
                remove_run(self._client, self.run_id, by=older.info.run_id)
                return False
        unfinished = [run for run in older_first if not outputs(run.data.tags) and run.data.tags.get(BYTES) == kind]
        for run in [*equal, *unfinished]:
            remove_run(self._client, run.info.run_id, by=self.run_id)
        return True

    def _continued(self) -> tuple[Run, int, bool] | None:
        """Return the run that a shipper opened for the record before it ended, if the store still has it."""
        path = self.record.folder / SHIPPED
        opened: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {"run_id": None}
        runs = StoredRuns(self._client)({"state": self.info.state})
        return next(((run, opened["attempt"], True) for run in runs if run.info.run_id == opened["run_id"]), None)

    def _opened(self, *, is_new: bool = False) -> tuple[Run, int, bool]:
        """Find the run that the record belongs to, or create it, always if `is_new`; count the attempt."""
        info, client = self.info, self._client
        began = int(info.began * 1000)
        tags = _plain(info.tags)
        with store_lock(client.tracking_uri):  # until the run names its process: no other process closes or removes it
            existing = None if is_new else find_own_run(client, info)
            run = existing or client.create_run(
                experiment_id(client, info.experiment),
                start_time=began,
                tags=tags | parent_tag(client, tags),
                run_name=info.name,
            )
            attempt = int(run.data.tags.get(ATTEMPTS, 0)) + 1
            tags |= clone_tag(existing.data.tags if existing else {})
            params = [Param(*pair) for pair in info.params.items() if pair[0] not in run.data.params]
            tags |= {ATTEMPTS: str(attempt), BEGAN: str(began)}
            client.log_batch(run.info.run_id, params=params, tags=[RunTag(*pair) for pair in tags.items()])
            if existing:
                client.update_run(run.info.run_id, status=RUNNING)
        return run, attempt, existing is not None

    def _use(self, opened: tuple[Run, int, bool]) -> None:
        """Ship to a run from now on, from the record's beginning."""
        run, self._attempt, self._has_points = opened
        self.run_id = run.info.run_id
        self._run_outs = outputs(run.data.tags)  # of earlier attempts
        self._tags: dict[str, str | None] = dict(run.data.tags)
        self._steps_of: dict[str, set[int]] = {}  # metric → steps at which the run has a value, of any attempt
        self._offset = 0
        write_json(self.record.folder / SHIPPED, {"run_id": self.run_id, "attempt": self._attempt})
        self._client.log_artifacts(self.run_id, str(self.record.artifacts))

    def _ship_points(self) -> None:
        """Log the new points in one request; those that an earlier attempt logged stay."""
        points, offset = self.record.points(self._offset)
        metrics = []
        for point in points:
            if point.key not in self._steps_of:  # a new run has none, and a query for each metric takes long
                history = self._client.get_metric_history(self.run_id, point.key) if self._has_points else []
                self._steps_of[point.key] = {metric.step for metric in history}
            step = self._attempt - 1 if point.step is None else point.step
            if step not in self._steps_of[point.key]:
                metrics.append(Metric(point.key, point.value, int(point.time * 1000), step))
                self._steps_of[point.key].add(step)
        if metrics:
            self._client.log_batch(self.run_id, metrics=metrics)
        self._offset = offset

    def _ship_tags(self, tags: Mapping[str, str | None]) -> None:
        changed = {key: value for key, value in tags.items() if self._tags.get(key) != value}
        for key in [key for key, value in changed.items() if value is None]:
            self._client.delete_tag(self.run_id, key)
        if new := _plain(changed):
            self._client.log_batch(self.run_id, tags=[RunTag(*pair) for pair in new.items()])
        self._tags |= changed


def attempt_file(kind: str, attempt: int) -> str:
    """Return the name of an attempt's artifact, such as `environment.json` or `environment-2.json`."""
    return f"{kind}.json" if attempt == 1 else f"{kind}-{attempt}.json"


def find_own_run(client: MlflowClient, info: RunInfo) -> Run | None:
    """Return the run of a state that a record continues, if there is one; never one in progress elsewhere.

    An execution continues the run of machines that make the same bytes, or an unfinished one. A rebuilt run is the one
    with the same outputs, or an unfinished one of this type of machine.
    """

    def is_in_progress(run: Run) -> bool:
        return run.info.status == RUNNING and not _is_dead(run) and run.data.tags.get(PROCESS) != info.tags.get(PROCESS)

    runs = [run for run in StoredRuns(client)({"state": info.state}) if not is_in_progress(run)]
    ours = (None, machine_key())
    unfinished = [run for run in runs if run.data.tags.get("machine") in ours and not outputs(run.data.tags)]
    kind = info.tags.get(BYTES)
    same = [run for run in runs if (run.data.tags.get(BYTES) == kind if kind else outputs(run.data.tags) == info.outs)]
    return next(iter([*same, *unfinished]), None)


def remove_run(client: MlflowClient, run_id: str, *, by: str) -> bool:
    """Delete a run and its models, with a tag that names the run in its place; `gradtrail gc` purges it.

    Returns:
        False for a run that stays: a process opened it meanwhile, or MLflow's registry needs it.
    """
    with store_lock(client.tracking_uri):
        run = client.get_run(run_id)
        if run.info.status == RUNNING or run_id in registered_models(client):
            return False
        client.set_tag(run_id, REPLACED, by)
        for model in models_of(client, run):
            client.delete_logged_model(model.model_id)
        client.delete_run(run_id)
        return True


def close_dead_runs(client: MlflowClient, runs: Iterable[Run]) -> tuple[list[Run], list[Run]]:
    """Close runs whose process was on this host and no longer exists: as KILLED, unless an earlier attempt finished.

    Returns:
        The runs that were closed, and the open ones whose process may still exist, here or on another host.
    """
    runs = [run for run in runs if run.info.status == RUNNING]
    dead = [run for run in runs if _is_dead(run)]
    for run in dead:
        client.set_terminated(run.info.run_id, FINISHED if outputs(run.data.tags) else KILLED)
    return dead, [run for run in runs if run not in dead]


def is_at_work(info: RunInfo) -> bool:
    """Whether the stage of a record still works."""
    return info.status == RUNNING and is_alive(_plain(info.tags))


def _is_dead(run: Run) -> bool:
    return is_of_this_host(run.data.tags) and not is_alive(run.data.tags)


def _plain(tags: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in tags.items() if value is not None}
