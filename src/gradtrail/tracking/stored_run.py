"""The content of a run in MLflow, made only from a stage's declaration and outputs, so that it can be rebuilt."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag

from gradtrail.stages.artifacts.data_files import DIGEST_LENGTH
from gradtrail.stages.common.params import PARAMS, active_params
from gradtrail.stages.common.stage import Stage
from gradtrail.support.errors import UserError
from gradtrail.tracking.artifacts import announce_tables, log_results, log_small_figure, read_curves
from gradtrail.tracking.environment import machine_key
from gradtrail.tracking.journal import EXPORT
from gradtrail.tracking.models import log_export, models_of, registered_models
from gradtrail.tracking.names import COMPILED, FIGURES, NOTE, note, rounded, run_metrics, run_name, summary_in
from gradtrail.tracking.runs import PARENT, StoredRuns, link_runs, training_of, trainings_of
from gradtrail.tracking.state import Identity
from gradtrail.tracking.store import experiment_id, store_lock
from gradtrail.tracking.tags import (
    BEGAN,
    clone_tag,
    is_alive,
    is_of_this_host,
    output_tags,
    outputs,
    param_text,
    stage_params,
    state_tags,
)

REBUILT, REPLACED, BYTES = "rebuilt", "replaced_by", "bytes"
_WEIGHTS = "models/"
LINEAGE = "lineage.json"
_PAGE = ".html"  # suffix of an output that is a single page
Environment = Mapping[str, Any]  # as `environment` returns it
Points = Mapping[str, Mapping[int, float]]  # name → step → value


class StoredRun:
    """A run in the store, from its content before an attempt; without `has_points` it is new."""

    def __init__(self, client: MlflowClient, run: Run, attempt: int, *, has_points: bool):
        self.client = client
        self.run_id = run.info.run_id
        self.attempt = attempt  # number of executions of the state, this one included
        self.outs = outputs(run.data.tags)  # digests of the outputs of earlier attempts
        self._is_rebuilt = REBUILT in run.data.tags
        self._has_points = has_points
        self._logged: dict[str, set[int]] = {}

    def describe(self, stage: Identity, environment: Environment | None = None) -> None:
        """Log what made the run: its params and states as files, and the environment."""
        self.client.log_dict(self.run_id, stage.describe_lineage(), LINEAGE)
        sections = [stage.entry(name).params.get(str(PARAMS), {}) for name in stage.lineage]
        self.client.log_dict(self.run_id, {key: value for one in sections for key, value in one.items()}, str(PARAMS))
        if environment:
            self.client.log_dict(self.run_id, dict(environment), attempt_file("environment", self.attempt))

    def log_points(self, *timed: tuple[Points, float]) -> None:
        """Log metrics, each with its time, in one request; points that the run already has stay."""
        new = [
            Metric(name, rounded(value), int(seconds * 1000), int(step))
            for points, seconds in timed
            for name, curve in points.items()
            for step, value in curve.items()
            if step not in self._steps(name)
        ]
        if new:
            self.client.log_batch(self.run_id, metrics=new)
        for metric in new:
            self._steps(metric.key).add(metric.step)

    def log_outs(self, stage: Identity, outs: Mapping[str, str]) -> None:
        """Log the outputs of the stage, from the files.

        An export is logged as a model of its training's run. Data, weights and parquet tables, which DVC's cache has,
        are logged as digests, unless `runtime.copy_outs` asks for copies of weights and tables. The stage's folder has
        the other outputs.
        """
        metrics, folder = _read_metrics(stage), stage.folder / "results" / stage.name
        single = {name: {0: value} for name, value in run_metrics(stage.name, metrics).items()}
        self.log_points((single | read_curves(folder, stage.name, metrics), time.time()))
        costs = stage.folder / "results" / "costs" / f"{stage.name}.json"
        log_results(self.client, self.run_id, folder, costs, tables=stage.runtime.copy_outs)
        for out in stage.spec.outs:
            if out.endswith(_PAGE):
                self.log_files(stage.folder / out)
        self._log_dataset(stage, metrics)
        for out in stage.spec.outs if stage.runtime.copy_outs else ():
            if out.startswith(_WEIGHTS) and (stage.folder / out).is_file():  # the weights of the epochs are DVC's alone
                self.log_files(stage.folder / out, "models")
        tags = {"dataset": metrics["dataset"], "dataset_digest": metrics["dataset_digest"][:DIGEST_LENGTH]}
        self.set_tags(output_tags(stage, outs) | tags)
        if EXPORT in stage.spec.outs:
            for train in trainings_of(self.client.get_run(self.run_id), StoredRuns(self.client)):
                log_export(self.client, train, stage.folder / EXPORT)
        lineage = stage.describe_lineage()
        lineage[stage.name]["outs"] = outs
        self.client.log_dict(self.run_id, lineage, LINEAGE)
        if stage.name in FIGURES and (figure := folder / FIGURES[stage.name][0]).is_file():
            log_small_figure(self.client, self.run_id, figure)
        self._write_note(folder / "summary.md")

    def mark_as_executed(self) -> None:
        """Remove the mark of a run that was rebuilt: an execution wrote its outputs."""
        if self._is_rebuilt:
            self.client.delete_tag(self.run_id, REBUILT)

    def link_runs(self) -> None:
        """Link the run to its parent and children, and close the runs of processes that no longer exist."""
        runs = StoredRuns(self.client)
        link_runs(self.client, self.client.get_run(self.run_id), runs)
        close_dead_runs(self.client, runs.running())

    def log_files(self, path: Path, under: str = "") -> None:
        """Log a file, or the files of a folder, as artifacts."""
        log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        log(self.run_id, str(path), under or None)
        if under == COMPILED.parent.as_posix():
            announce_tables(self.client, self.run_id, [COMPILED.as_posix()])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set several tags in one request."""
        self.client.log_batch(self.run_id, tags=[RunTag(*pair) for pair in tags.items()])

    def _steps(self, name: str) -> set[int]:
        """The steps at which the run has a value, of an earlier attempt or of this one."""
        if name not in self._logged:
            # A new run has none, and a query for each metric takes long.
            history = self.client.get_metric_history(self.run_id, name) if self._has_points else []
            self._logged[name] = {metric.step for metric in history}
        return self._logged[name]

    def _write_note(self, summary: Path) -> None:
        """Write the description of the run; a training keeps the summary from its gradients' run."""
        data = self.client.get_run(self.run_id).data
        words = summary.read_text(encoding="utf-8") if summary.is_file() else summary_in(data.tags.get(NOTE, ""))
        self.set_tags({NOTE: note(self.run_id, data.tags, data.params, data.metrics, words)})

    def _log_dataset(self, stage: Identity, metrics: Mapping[str, Any]) -> None:
        is_split = any(dep.startswith("data/processed") for dep in stage.spec.deps)
        source = json.dumps({"uri": "data/processed" if is_split else "data/raw"})
        name = metrics["dataset"]
        if is_split and stage.experiment == "data":
            name = f"{name} splits"  # MLflow keeps the first source of a name and digest, that of `fetch`
        dataset = Dataset(name, metrics["dataset_digest"][:DIGEST_LENGTH], "local", source)
        context = "training" if stage.name == "train" else stage.name
        self.client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])])


def open_run(
    client: MlflowClient,
    stage: Identity,
    tags: Mapping[str, str],
    environment: Environment | None = None,
    *,
    began: float | None = None,
    is_new: bool = False,
) -> StoredRun:
    """Find the run of the state that `stage` makes, or create it; count the attempt.

    Args:
        tags: Process, commit and experiment.
        environment: Environment of the process; None for a run that is rebuilt.
        began: Start of the process in seconds; by default now.
        is_new: True if a run is created in any case.
    """
    experiment = experiment_id(client, stage.experiment)
    tags = dict(tags)
    if environment:
        tags |= {"machine": environment["machine"], "jax": environment["packages"].get("jax", "")}
        tags[BYTES] = environment["bytes"]
    began_ms = int((began or time.time()) * 1000)
    with store_lock(client.tracking_uri):  # until the run names its process: no other process closes or removes it
        existing = None if is_new else find_own_run(client, stage, tags.get(BYTES))
        run = existing or client.create_run(
            experiment,
            start_time=began_ms,
            tags=_first_tags(client, stage) | tags,
            run_name=run_name(stage),
        )
        attempt = int(run.data.tags.get("attempts", 0)) + 1
        tags |= clone_tag(existing.data.tags if existing else {})
        tags |= {"attempts": str(attempt), BEGAN: str(began_ms)}
        read = active_params(stage_params(stage)).items()
        params = [Param(key, param_text(value)) for key, value in read if key not in run.data.params]
        client.log_batch(run.info.run_id, params=params, tags=[RunTag(*pair) for pair in tags.items()])
        if existing:
            client.update_run(run.info.run_id, status="RUNNING")
    return StoredRun(client, run, attempt, has_points=existing is not None)


def continue_run(client: MlflowClient, stage: Identity, run_id: str, attempt: int) -> StoredRun | None:
    """Return the run that an attempt opened before its logging ended; None if the store does not have it any more."""
    run = next((run for run in StoredRuns(client)({"state": stage.state}) if run.info.run_id == run_id), None)
    return StoredRun(client, run, attempt, has_points=True) if run else None


def attempt_file(kind: str, attempt: int) -> str:
    """Return the name of an attempt's artifact, such as `environment.json` or `environment-2.json`."""
    return f"{kind}.json" if attempt == 1 else f"{kind}-{attempt}.json"


def remove_run(client: MlflowClient, run: Run, why: str, *, by: str) -> bool:
    """Delete a run and its models, with a tag `why` that names the run that replaces it; `gradtrail gc` purges it.

    Returns:
        False for a run that stays: a process opened it meanwhile, or MLflow's registry needs it.
    """
    with store_lock(client.tracking_uri):
        is_open = client.get_run(run.info.run_id).info.status == "RUNNING"
        if is_open or run.info.run_id in registered_models(client):
            return False
        client.set_tag(run.info.run_id, why, by)
        for model in models_of(client, run):
            client.delete_logged_model(model.model_id)
        client.delete_run(run.info.run_id)
        return True


def find_own_run(client: MlflowClient, stage: Identity, bytes_key: str | None) -> Run | None:
    """Return the run of a state to continue, if there is one.

    Args:
        bytes_key: Type of machines that make the same bytes of the state: then their run is returned, or an unfinished
            one of a rebuild.
            None for a rebuild: then the run with the same outputs, or an unfinished one of this type of machine; none
            that is open on another host.
    """
    runs = StoredRuns(client)({"state": stage.state})
    ours = (None, machine_key())
    unfinished = [run for run in runs if run.data.tags.get("machine") in ours and not outputs(run.data.tags)]
    if bytes_key:
        of_same_bytes = [run for run in runs if run.data.tags.get(BYTES) == bytes_key]
        return next(iter([*of_same_bytes, *unfinished]), None)
    outs = stage.out_digests()
    same = [run for run in runs if outputs(run.data.tags) == outs]
    closed_or_here = (run for run in [*same, *unfinished] if run.info.status != "RUNNING" or is_alive(run.data.tags))
    return next(closed_or_here, None)


def close_dead_runs(client: MlflowClient, runs: Iterable[Run]) -> tuple[list[Run], list[Run]]:
    """Close runs whose process was on this host and no longer exists: as KILLED, unless an earlier attempt finished.

    Returns:
        The runs that were closed, and the open ones whose process may still exist, here or on another host.
    """
    runs = [run for run in runs if run.info.status == "RUNNING"]
    dead = [run for run in runs if is_of_this_host(run.data.tags) and not is_alive(run.data.tags)]
    for run in dead:
        client.set_terminated(run.info.run_id, "FINISHED" if outputs(run.data.tags) else "KILLED")
    return dead, [run for run in runs if run not in dead]


def _first_tags(client: MlflowClient, stage: Identity) -> dict[str, str]:
    tags = state_tags(stage)
    parent = training_of(tags, StoredRuns(client))
    return tags | ({PARENT: parent.info.run_id} if parent else {})


def _read_metrics(stage: Stage) -> dict[str, Any]:
    """Read the metrics file of a stage; raise UserError if it does not name the data set."""
    metrics = stage.read_metrics()
    for key in ("dataset", "dataset_digest"):
        if not isinstance(metrics.get(key), str):
            raise UserError(f"results/metrics/{stage.name}.json: {key} should be text, got {metrics.get(key)!r}")
    return metrics
