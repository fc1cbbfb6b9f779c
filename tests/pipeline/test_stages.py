"""The real stages, once, on the digits: what they write, what they say, and what MLflow shows of them."""

import contextlib
import json
import re
import sqlite3
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from projects import STAGES, Project, finished_project

from gradtrail.stages.common.files import digest
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.model.exported import read_export


@pytest.fixture(scope="module")
def project() -> Project:
    """What no test here changes."""
    return finished_project()


def test_metrics_are_flat_and_name_the_data_set(project: Project) -> None:
    for metrics in map(project.metrics_of, STAGES):
        assert metrics["dataset"] == "digits"
        assert len(metrics["dataset_digest"]) == 12
        assert all(isinstance(value, int | float | str) for value in metrics.values())


def test_figures_of_a_quick_training(project: Project) -> None:
    evaluate = project.metrics_of("evaluate")
    assert project.metrics_of("train")["num_parameters"] == 784 * 32 + 32 + 32 * 10 + 10
    assert evaluate["accuracy_low"] < evaluate["accuracy"] < evaluate["accuracy_high"]
    assert evaluate["accuracy"] > 0.6
    assert evaluate["num_examples"] == project.metrics_of("fetch")["test_examples"]
    assert project.metrics_of("preprocess")["noisy_labels"] > 0
    remaining = sorted(path.name for path in (project.folder / "models/epochs").iterdir())
    assert remaining == ["000.safetensors", "002.safetensors"]


@pytest.mark.slow
def test_images_of_the_test_split_get_the_labels_that_evaluation_gave_them(project: Project, tmp_path: Path) -> None:
    images = np.load(project.folder / "data/processed/test/images.npy")[:5]
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    names = [str(tmp_path / f"{number}.png") for number in range(5)]
    options = ("--figure", str(tmp_path / "seen.png"))
    output = project.gradtrail("predict", *names, *options)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "blank.png")
    second_output = project.gradtrail("predict", names[0], str(tmp_path / "blank.png"), names[1], status=2)
    assert second_output.splitlines()[:2] == output.splitlines()[:2]
    assert "blank.png: the image is blank" in second_output
    *answers, calibrated = output.splitlines()
    assert calibrated.startswith("probabilities are calibrated (temperature ")
    labels = [int(line.split(": ")[1].split()[0]) for line in answers]
    assert labels == pd.read_parquet(project.folder / "results/evaluate/predictions.parquet")["predicted"][:5].tolist()
    with Image.open(tmp_path / "seen.png") as picture:
        assert picture.height > 500


def test_every_example_has_its_scores(project: Project) -> None:
    scores = pd.read_parquet(project.folder / "results/gradients/scores.parquet")
    sizes = {split: project.metrics_of("preprocess")[f"{split}_examples"] for split in ("train", "validation", "test")}
    assert scores["split"].value_counts().to_dict() == sizes
    assert not scores.duplicated(["split", "example_id"]).any()
    assert np.isfinite(scores[["grad_norm", "el2n", "loss", "margin", "input_norm"]]).all().all()
    noisy = scores["label"] != scores["true_label"]
    assert noisy.sum() == project.metrics_of("preprocess")["noisy_labels"]
    assert (scores.loc[noisy, "split"] == "train").all()
    assert scores.loc[noisy, "grad_norm"].median() > scores.loc[~noisy, "grad_norm"].median()


def test_the_export_answers_as_the_evaluation_did(project: Project) -> None:
    metrics, evaluate = project.metrics_of("export"), project.metrics_of("evaluate")
    for name in ("accuracy", "accuracy_low", "expected_calibration_error", "num_examples"):
        assert metrics[name] == pytest.approx(evaluate[name])
    output = pd.read_parquet(project.folder / "results/evaluate/predictions.parquet").filter(regex="^probability_")
    own_result = read_export(project.folder / "models/export").predict(
        np.load(project.folder / "data/processed/test/images.npy")
    )
    np.testing.assert_allclose(own_result, output, atol=0.02)  # float16
    assert metrics["largest_difference"] <= 0.02


def test_report_is_logged_with_the_numbers_of_the_evaluation(project: Project) -> None:
    (run,) = project.runs_of("report")
    assert run["name"].startswith("report mlp adamw digits · ")
    page = (project.folder / "results/report.html").read_bytes()
    assert (run["artifacts"] / "report.html").read_bytes() == page
    assert f"{project.metrics_of('evaluate')['accuracy']:.2%}" in page.decode()
    assert "not comparable with results on other data sets" in page.decode()
    assert "report.html" not in project.git("status", "--porcelain", "--untracked-files=all")
    assert (project.folder / "results/gradients/label_error_scores.png").exists()


@pytest.mark.slow
def test_plots_and_metrics_for_people(project: Project, tmp_path: Path) -> None:
    project.dvc("plots", "show", "--out", str(tmp_path))
    page = (tmp_path / "index.html").read_text()
    assert all(title in page for title in ("Loss by epoch", "Accuracy by epoch", "Confusion", "Calibration"))
    assert project.dvc("exp", "show", "--csv").count("accuracy") > 0


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
    assert train["name"].startswith("mlp adamw digits · ")
    assert all(len(run["metrics"]) <= 36 for run in runs.values()), "with room for the system's"
    assert train["metrics"]["eval/accuracy"] == pytest.approx(project.metrics_of("evaluate")["accuracy"], rel=1e-3)
    best = project.metrics_of("train")["best_validation_accuracy"]
    assert train["metrics"]["train/best_validation_accuracy"] == pytest.approx(best, rel=1e-3)
    assert train["metrics"]["train/best_validation_loss"] <= train["metrics"]["train/validation_loss"]
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
    assert lineage["train"]["deps"]["data/processed/train"] == digest(project.folder / "data/processed/train")
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
    assert accuracies == [(pytest.approx(project.metrics_of("evaluate")["accuracy"], rel=1e-3), "digits")]
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
        assert values[0] == pytest.approx(every.max(), rel=5e-4), "four significant digits"
        assert len(values) == min(1000, len(every))


def test_the_profile_run_has_times_in_figures_and_tables(project: Project) -> None:
    (run,) = project.runs_of("profile")
    folder = project.folder / "mlruns" / run["id"] / "artifacts" / "timings"
    names = ("times", "roofline")
    assert {f"{name}.png" for name in names} <= {path.name for path in folder.iterdir()}
    functions = pd.read_csv(folder / "functions.csv")
    assert set(functions["function"]) == {"train_step", "predict", "score"}
    assert set(functions["precision"]) == {"float16", "float32"}
    assert (functions["examples_per_second"] > 0).all()
    low, ratio, high = (run["metrics"][f"profile/float16_over_float32{end}"] for end in ("_low", "", "_high"))
    assert 0 < low <= ratio <= high
