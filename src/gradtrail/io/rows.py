"""What a row in MLflow holds, made from a stage's declaration and its outs alone, so that a lost row can be remade."""

import getpass
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag

from gradtrail.io.curves import Curves, curves, noise_curves, read_tables
from gradtrail.io.digests import digest
from gradtrail.io.git import git
from gradtrail.io.identity import Identity
from gradtrail.io.metric_names import metric_name
from gradtrail.io.stages import Stage
from gradtrail.io.states import Entry
from gradtrail.io.store import experiment_id, store_lock

if TYPE_CHECKING:
    from gradtrail.core.train_step import TrainState

REBUILT = "rebuilt"
CHILDREN = ("evaluate", "gradients", "profile")  # their rows hang below the row of the training they belong to
_NOTE = "mlflow.note.content"  # what the UI shows as a run's description
_TABLES_TAG = "mlflow.loggedArtifacts"  # where MLflow's UI looks for tables
_EXPERIMENTS = {"fetch": "data", "preprocess": "data"}  # every other stage: models


class StoredRow:
    """A row in the store.

    Args:
        client: of the store.
        run_id: of the row.
        attempt: which run of the state this is, from 1.
    """

    def __init__(self, client: MlflowClient, run_id: str, attempt: int = 1):
        self.client = client
        self.run_id = run_id
        self.attempt = attempt
        self._logged: dict[str, set[int]] = {}

    def log_points(self, points: Mapping[str, Mapping[int, float]]) -> None:
        """Log metrics, name → step → value; a point that the row has already is left as it is."""
        now = int(time.time() * 1000)
        new = [
            Metric(name, float(value), now, int(step))
            for name, curve in points.items()
            for step, value in curve.items()
            if step not in self._steps(name)
        ]
        for start in range(0, len(new), 1000):
            self.client.log_batch(self.run_id, metrics=new[start : start + 1000])
        for metric in new:
            self._steps(metric.key).add(metric.step)

    def log_outs(self, stage: Stage) -> None:
        """Log what the stage wrote, from the files; then tie the row to others."""
        metrics = stage.read_metrics()
        points = _curves(stage, metrics)
        numbers = {metric_name(stage.name, key): value for key, value in metrics.items() if not isinstance(value, str)}
        self.log_points({name: {0: value} for name, value in numbers.items()} | points)
        self._log_results(stage.folder / "results" / stage.name)
        self._log_dataset(stage, metrics)
        tags = {f"output/{out}": digest(stage.folder / out) for out in stage.spec.outs}
        tags |= {"dataset": metrics["dataset"], "dataset_digest": metrics["dataset_digest"]}
        summary = stage.folder / "results" / stage.name / "summary.md"
        tags |= {_NOTE: summary.read_text(encoding="utf-8")} if summary.is_file() else {}
        self.set_tags(tags)
        tie(self.client, self.client.get_run(self.run_id))

    def log_files(self, path: Path, under: str) -> None:
        """Log a file, or the files of a folder, as artifacts."""
        log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        log(self.run_id, str(path), under)

    def log_checkpoint(self, state: "TrainState") -> None:
        """Log an Orbax checkpoint of a training state."""
        from gradtrail.io.checkpoints import temporary_checkpoint  # late: only training needs Orbax

        with temporary_checkpoint(state) as folder:
            self.client.log_artifacts(self.run_id, str(folder), "checkpoint")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set several tags at once."""
        self.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def _steps(self, name: str) -> set[int]:
        """The steps at which the row has a value already: of an earlier attempt, or of this one."""
        if name not in self._logged:
            self._logged[name] = {metric.step for metric in self.client.get_metric_history(self.run_id, name)}
        return self._logged[name]

    def _log_results(self, folder: Path) -> None:
        if folder.is_dir():
            self.client.log_artifacts(self.run_id, str(folder), "results")
        tables = {f"tables/{table.stem}.json": pd.read_csv(table) for table in sorted(folder.glob("*.csv"))}
        for path, table in tables.items():  # not `log_table`, which appends to what an earlier attempt logged
            self.client.log_dict(self.run_id, json.loads(table.to_json(orient="split", index=False)), path)
        if tables:
            self.set_tags({_TABLES_TAG: json.dumps([{"path": path, "type": "table"} for path in tables])})

    def _log_dataset(self, stage: Stage, metrics: Mapping[str, Any]) -> None:
        source = json.dumps({"uri": "data/raw" if stage.name in _EXPERIMENTS else "data/processed"})
        dataset = Dataset(metrics["dataset"], metrics["dataset_digest"][:32], "local", source)
        context = "training" if stage.name == "train" else stage.name
        self.client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])])


def open_row(client: MlflowClient, stage: Identity) -> StoredRow:
    """Find the row of the state that `stage` is about to make, or create it; count the attempt."""
    experiment = experiment_id(client, _EXPERIMENTS.get(stage.name, "models"))
    with store_lock(client.tracking_uri):
        found = find_row(client, state=stage.state)
        run = found or client.create_run(experiment, tags=_first_tags(client, stage), run_name=run_name(stage))
    attempt = int(run.data.tags.get("attempts", 0)) + 1
    if found:
        client.update_run(run.info.run_id, status="RUNNING")
        if REBUILT in found.data.tags:
            client.delete_tag(run.info.run_id, REBUILT)
    params = [Param(key, shown(value)) for key, value in stage_params(stage).items() if key not in run.data.params]
    tags = {"attempts": str(attempt), "process": f"{socket.gethostname()}:{os.getpid()}"}
    tags |= {**_code_tags(), **_experiment_tags()}
    client.log_batch(run.info.run_id, params=params, tags=[RunTag(key, value) for key, value in tags.items()])
    client.log_dict(run.info.run_id, stage.describe_lineage(), "lineage.json")
    return StoredRow(client, run.info.run_id, attempt)


def find_row(client: MlflowClient, **tags: str) -> Run | None:
    """Return the newest row that carries all these tags."""
    rows = find_rows(client, tags)
    return rows[0] if rows else None


def find_rows(client: MlflowClient, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
    """Return all rows that carry all these tags, the newest first; only finished ones if asked."""
    experiments = [experiment_id(client, name) for name in ("data", "models")]
    conditions = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
    conditions += ["attributes.status = 'FINISHED'"] if finished else []
    return list(client.search_runs(experiments, " and ".join(conditions), order_by=["attributes.start_time DESC"]))


def find_twin(client: MlflowClient, stage: Identity) -> Run | None:
    """Return a finished row of the same stage, code, inputs and params read, under another training, if there is one.

    Two trainings may write the same bytes; then DVC evaluates once, and one row serves both.
    """
    if stage.name not in CHILDREN:
        return None
    entry = stage.entry(stage.name)
    tags = {"stage": stage.name, "code": entry.code_digest, **_input_tags(entry)}
    read = {key: shown(value) for key, value in _flat_params(entry).items()}
    twins = find_rows(client, tags, finished=True)
    return next((row for row in twins if read.items() <= row.data.params.items()), None)


def is_whole(row: Run) -> bool:
    """Whether a row is finished, or a process of this machine is still at work on it."""
    host, _, pid = row.data.tags.get("process", "").rpartition(":")
    is_alive = host == socket.gethostname() and psutil.pid_exists(int(pid))
    return row.info.status == "FINISHED" or (row.info.status == "RUNNING" and is_alive)


def run_name(stage: Identity) -> str:
    """Name a row so that a person can read it, such as `train mlp-256-128 adamw float32`."""
    params = stage_params(stage)
    match stage.name:
        case "fetch" | "preprocess":
            return f"{stage.name} {params['fetch.dataset']}"
        case "train" | "profile":
            kind = params["train.model"]
            widths = [*params.get(f"train.{kind}.channels", []), *params.get(f"train.{kind}.hidden", [])]
            model = "-".join([kind, *map(str, widths)])
            return f"{stage.name} {model} {params['train.optimizer']} {params['train.precision']}"
    return f"{stage.name} {params[f'{stage.name}.weights']}"


def stage_params(stage: Identity) -> dict[str, Any]:
    """Return the params of the stage and of all stages before it, flat: `train.mlp.hidden` → value."""
    return {key: value for name in stage.lineage for key, value in _flat_params(stage.entry(name)).items()}


def tie(client: MlflowClient, row: Run) -> None:
    """Copy headline figures from children to the training rows whose outputs they read, whichever ends last."""
    if row.data.tags["stage"] == "train":
        for child in _children(client, row):
            if "mlflow.parentRunId" not in child.data.tags:
                client.set_tag(child.info.run_id, "mlflow.parentRunId", row.info.run_id)
            _copy_headlines(client, child, row.info.run_id)
    if row.data.tags["stage"] in CHILDREN:
        for train in _trainings(client, row):
            _copy_headlines(client, row, train.info.run_id)


def _first_tags(client: MlflowClient, stage: Identity) -> dict[str, str]:
    """Tags that stay as they are for the life of a row."""
    entry = stage.entry(stage.name)
    tags = {"stage": stage.name, "state": stage.state, "code": entry.code_digest}
    tags |= {"mlflow.source.name": f"pipeline/{stage.name}.py", "mlflow.user": _user()}
    tags |= _input_tags(entry)
    if stage.name in CHILDREN:
        tags["train_state"] = stage.state_of("train")
        parent = find_row(client, state=tags["train_state"])
        if parent:
            tags["mlflow.parentRunId"] = parent.info.run_id
    return tags


def _input_tags(entry: Entry) -> dict[str, str]:
    return {f"input/{dep}": found for dep, found in entry.data.items()}


def _children(client: MlflowClient, train: Run) -> Iterator[Run]:
    """Yield, for each stage below training, the newest finished row that belongs to this training or its bytes."""
    final = train.data.tags.get("output/models/final.safetensors")
    for name in CHILDREN:
        own = find_rows(client, {"stage": name, "train_state": train.data.tags["state"]}, finished=True)
        alike = (
            find_rows(client, {"stage": name, "input/models/final.safetensors": final}, finished=True) if final else []
        )
        if own or alike:
            yield (own or alike)[0]


def _trainings(client: MlflowClient, child: Run) -> list[Run]:
    """Return the rows of the trainings that wrote what the child read, or that it names."""
    final = child.data.tags.get("input/models/final.safetensors")
    if final:
        return find_rows(client, {"stage": "train", "output/models/final.safetensors": final})
    return find_rows(client, {"stage": "train", "state": child.data.tags["train_state"]})


def _copy_headlines(client: MlflowClient, child: Run, train_id: str) -> None:
    """Copy the child's figures, those of single classes and functions aside, and what it says in words."""
    now, prefix = int(time.time() * 1000), metric_name(child.data.tags["stage"], "")
    chosen = {name: v for name, v in child.data.metrics.items() if name.startswith(prefix) and name.count("/") == 1}
    shown = client.get_run(train_id).data.metrics
    metrics = [Metric(name, value, now, 0) for name, value in chosen.items() if shown.get(name) != value]
    tags = [RunTag(_NOTE, child.data.tags[_NOTE])] if _NOTE in child.data.tags else []
    client.log_batch(train_id, metrics=metrics, tags=tags)


def _curves(stage: Stage, metrics: Mapping[str, Any]) -> Curves:
    """Return the curves of a stage from its tables; one that keeps none has none."""
    folder = stage.folder / "results" / stage.name
    if (folder / "noise_scale.csv").is_file():
        return noise_curves(pd.read_csv(folder / "noise_scale.csv"), stage.name)
    if not (folder / "epochs.csv").is_file():
        return {}
    return curves(*read_tables(folder), metrics["planned_steps"])


def _flat_params(entry: Entry) -> dict[str, Any]:
    """Return the params that a stage reads, flat."""
    sections = entry.params.get("params.yaml", {})
    return {key: leaf for section, value in sections.items() for key, leaf in _flatten(section, value).items()}


def _flatten(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value}
    return {name: leaf for part, inner in value.items() for name, leaf in _flatten(f"{key}.{part}", inner).items()}


def shown(value: Any) -> str:
    """Return a param's value as a row has it."""
    return "null" if value is None else str(value)


def _code_tags() -> dict[str, str]:
    """Which commit the code is of, and whether it was changed since."""
    commit = git("rev-parse", "HEAD")
    if not commit:
        return {}
    return {"mlflow.source.git.commit": commit, "git.dirty": str(bool(git("status", "--porcelain"))).lower()}


def _experiment_tags() -> dict[str, str]:
    names = {"dvc.exp_name": "DVC_EXP_NAME", "dvc.exp_baseline": "DVC_EXP_BASELINE_REV"}
    return {tag: os.environ[name] for tag, name in names.items() if os.environ.get(name)}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        return str(os.getuid())
