"""What MLflow shows of the real stages' first run on the digits, and that each state keeps one run."""

import contextlib
import json
import re
import sqlite3
from pathlib import Path

import pandas as pd
import pytest
from projects import STAGES, Project, finished_project

from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.tracking.mlflow.tracker import SYSTEM_METRICS


@pytest.fixture(scope="module")
def project() -> Project:
    """What no test here changes."""
    return finished_project()


def test_runs_have_results_and_digests_of_outs(project: Project) -> None:
    """What DVC's cache has anyhow, and nobody opens in a browser, is not stored twice."""
    for stage in STAGES:
        (run,) = project.runs_of(stage)
        logged = {path.relative_to(run["artifacts"] / "results") for path in run["artifacts"].glob("results/**/*.*")}
        folder = project.folder / "results" / stage
        written = {path.relative_to(folder) for path in folder.glob("**/*.*")}
        assert logged == {path for path in written if path.suffix != ".parquet"}
        assert not list(run["artifacts"].rglob("*.safetensors"))
        for out in read_pipeline(project.folder / "dvc.yaml")[stage].outs:
            assert run["outs"][out] == digest(project.folder / out)


def test_each_stage_has_one_run_in_mlflow(project: Project) -> None:
    runs = {run["tags"]["stage"]: run for run in project.runs()}
    assert set(runs) == set(STAGES)
    assert len(project.runs()) == len(STAGES)
    assert {run["status"] for run in runs.values()} == {"FINISHED"}
    train = runs["train"]
    assert train["name"].startswith("mlp-32 · float16 · digits · ")
    assert {"label noise 10 %", "shard mib 1", "3 epochs", "keep 0,2,99"} <= set(train["name"].split(" · "))
    assert all(len(run["metrics"]) <= 40 - len(SYSTEM_METRICS) for run in runs.values()), "with room for the system's"
    assert train["metrics"]["eval/accuracy"] == pytest.approx(project.metrics_of("evaluate")["accuracy"])
    assert train["metrics"]["gradients/grad_norm_median"] > 0
    assert train["params"]["preprocess.label_noise"] == "0.1"
    assert not any(name.startswith("system/") for name in train["metrics"]), "the stage takes less than a minute"
    for stage in ("evaluate", "export", "gradients", "profile", "report"):
        assert runs[stage]["tags"]["mlflow.parentRunId"] == train["id"]
    for stage, run in runs.items():
        assert run["tags"]["dataset"] == "digits", stage
        assert len(run["tags"]["state"]) == 64
        assert run["tags"]["mlflow.source.git.commit"] == project.git("rev-parse", "HEAD~1").strip()


def test_the_training_run_has_figures_tables_and_checkpoint(project: Project) -> None:
    (train,) = project.runs_of("train")
    artifacts = {path.relative_to(project.folder).as_posix() for path in (project.folder / "mlruns").rglob("*")}
    own_part = {path.split("artifacts/")[1] for path in artifacts if f"{train['id']}/artifacts/" in path}
    assert {"results/learning_curves.png", "results/steps.png", "tables/epochs.json"} <= own_part
    assert any(path.startswith("checkpoint/") for path in own_part)
    folder = project.folder / "mlruns" / train["id"] / "artifacts"
    lineage = json.loads((folder / "lineage.json").read_text())
    assert list(lineage) == ["fetch", "preprocess", "train"]
    assert lineage["train"]["state"] == train["tags"]["state"]
    assert lineage["train"]["deps"]["data/processed/train.npz"] == digest(project.folder / "data/processed/train.npz")
    assert lineage["train"]["outs"] == train["outs"]
    params = read_yaml(folder / "params.yaml")
    assert params["train"] == read_yaml(project.folder / "params.yaml")["train"], "the run itself has those in force"
    assert not any(key.startswith("train.cnn.") for key in train["params"])


def test_run_notes_have_results_and_a_figure(project: Project) -> None:
    (train,), (gradients,) = project.runs_of("train"), project.runs_of("gradients")
    words = train["tags"]["mlflow.note.content"]
    assert words.startswith(
        f"**{project.metrics_of('evaluate')['accuracy']:.2%} of the test images are classified correctly**"
    )
    for run in (train, gradients):
        output = run["tags"]["mlflow.note.content"]
        (place,) = re.findall(r"get-artifact\?path=(\S+?)&run_uuid=(\w+)", output)
        assert place[1] == run["id"]
        assert (run["artifacts"] / place[0].replace("%2F", "/")).is_file()
        assert "#### Largest gradients" in output


def test_the_export_is_a_model_with_the_figures_of_its_evaluation(project: Project) -> None:
    check_model(project)


def check_model(project: Project) -> None:
    """Assert that the training has one model, of the export's files, with the evaluation's metrics and run."""
    (train,), (evaluation,) = project.runs_of("train"), project.runs_of("evaluate")
    with contextlib.closing(sqlite3.connect(project.folder / "mlflow.db")) as store:
        result = store.execute("select name, model_id, source_run_id, artifact_location from logged_models").fetchall()
        query = "select metric_value, dataset_name from logged_model_metrics where model_id = ? and metric_name = ?"
        ((name, model, source, place),) = result
        accuracies = store.execute(query, [model, "eval/accuracy"]).fetchall()
        inputs = store.execute("select source_id from inputs where destination_id = ?", [model]).fetchall()
    assert name == f"{train['name'].replace('%', 'percent')} · final"
    assert source == train["id"]
    assert accuracies == [(pytest.approx(project.metrics_of("evaluate")["accuracy"]), "digits")]
    assert {run for (run,) in inputs} == {train["id"], evaluation["id"]}
    held = project.folder / "mlruns" / place.rpartition("/mlruns/")[2] / "data" / "export"
    assert digest(held) == digest(project.folder / "models/export")


@pytest.mark.slow
def test_sync_makes_the_model_from_the_outs(project: Project, tmp_path: Path) -> None:
    """Where the whole store is lost, and where the training's run alone is."""
    copy = project.copy(tmp_path / "project")
    (copy.folder / "mlflow.db").unlink()
    copy.sync()
    check_model(copy)
    (train,) = copy.runs_of("train")
    with contextlib.closing(sqlite3.connect(copy.folder / "mlflow.db")) as store, store:
        store.execute("delete from logged_models where source_run_id = ?", [train["id"]])
        store.execute("delete from logged_model_metrics")
        store.execute("delete from inputs where destination_type like 'MODEL%'")
    copy.sync()
    check_model(copy)


def test_tables_of_examples_are_sorted(project: Project) -> None:
    for stage, name, column in (("evaluate", "predictions", "loss"), ("gradients", "scores", "grad_norm")):
        (run,) = project.runs_of(stage)
        table = json.loads((run["artifacts"] / f"tables/{name}_by_{column}.json").read_text())
        values = [line[table["columns"].index(column)] for line in table["data"]]
        every = pd.read_parquet(project.folder / f"results/{stage}/{name}.parquet")[column]
        assert values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(every.max(), abs=1e-5)
        assert len(values) == min(1000, len(every))


def test_the_profile_run_has_times_in_figures_and_tables(project: Project) -> None:
    (run,) = project.runs_of("profile")
    folder = project.folder / "mlruns" / run["id"] / "artifacts" / "timings"
    names = ("jit", "batch_sizes", "precision_and_remat", "roofline", "where_the_time_goes")
    assert {f"{name}.png" for name in names} <= {path.name for path in folder.iterdir()}
    functions = pd.read_csv(folder / "functions.csv")
    assert set(functions["function"]) == {"train_step", "predict", "score"}
    assert set(functions["precision"]) == {"float16", "float32"}
    assert (functions["examples_per_second"] > 0).all()
    assert run["metrics"]["profile/jit/speedup"] > 0
    (train,) = project.runs_of("train")
    low, ratio, high = (f"profile/float16_over_float32{end}" for end in ("_low", "", "_high"))
    for metrics in (run["metrics"], train["metrics"]):
        assert 0 < metrics[low] <= metrics[ratio] <= metrics[high]
