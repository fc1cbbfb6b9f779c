"""The real stages, once, on the digits: what they write, and what they say. What MLflow shows is in test_runs.py."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from projects import STAGES, Project, besides_progress, finished_project

from gradtrail.stages.artifacts.exported import read_export


@pytest.fixture(scope="module")
def project() -> Project:
    """What no test here changes."""
    return finished_project()


@pytest.mark.parametrize("stage", STAGES)
def test_metrics_are_flat_and_name_the_data_set(project: Project, stage: str) -> None:
    metrics = project.metrics_of(stage)
    assert metrics["dataset"] == "digits"
    assert len(metrics["dataset_digest"]) == 12
    assert all(isinstance(value, int | float | str) for value in metrics.values())


def test_figures_of_a_quick_training(project: Project) -> None:
    train, evaluate = project.metrics_of("train"), project.metrics_of("evaluate")
    assert train["epochs"] == 3
    assert train["num_parameters"] == 784 * 32 + 32 + 32 * 10 + 10
    costs = json.loads((project.folder / "results/costs/train.json").read_text())
    assert costs["train_step"]["flops"] > 0
    assert evaluate["accuracy_low"] < evaluate["accuracy"] < evaluate["accuracy_high"]
    assert evaluate["accuracy"] > 0.6
    assert evaluate["num_examples"] == project.metrics_of("fetch")["test_examples"]
    assert project.metrics_of("preprocess")["noisy_labels"] > 0
    remaining = sorted(path.name for path in (project.folder / "models/epochs").iterdir())
    assert remaining == ["000.safetensors", "002.safetensors"]


@pytest.mark.slow
def test_images_of_the_test_split_get_the_labels_that_evaluation_gave_them(project: Project, tmp_path: Path) -> None:
    images = np.load(project.folder / "data/processed/test.npz")["images"][:5]
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
    for name in ("accuracy", "accuracy_low", "expected_calibration_error", "num_examples", "temperature"):
        assert metrics[name] == pytest.approx(evaluate[name])
    output = pd.read_parquet(project.folder / "results/evaluate/predictions.parquet").filter(regex="^probability_")
    own_result = read_export(project.folder / "models/export").predict(
        np.load(project.folder / "data/processed/test.npz")["images"]
    )
    np.testing.assert_allclose(own_result, output, atol=0.02)  # float16
    assert metrics["largest_difference"] <= 0.02


def test_report_is_logged_with_the_numbers_of_the_evaluation(project: Project) -> None:
    (run,) = project.runs_of("report")
    assert run["name"].startswith("report · mlp-32 · float16 · digits · ")
    page = (project.folder / "results/report.html").read_bytes()
    assert (run["artifacts"] / "report.html").read_bytes() == page
    assert project.metrics_of("report")["size_bytes"] == len(page)
    assert f"{project.metrics_of('evaluate')['accuracy']:.2%}" in page.decode()
    assert "not comparable with results on other data sets" in page.decode()
    assert "report.html" not in project.git("status", "--porcelain", "--untracked-files=all")
    assert (project.folder / "results/gradients/label_error_scores.png").exists()
    assert project.metrics_of("report")["num_figures"] == 9
    assert project.metrics_of("report")["num_images"] >= project.metrics_of("evaluate")["num_mistakes"]


WITH_A_SMALL_SAMPLE = """
from gradtrail.stages.artifacts import splits
splits.SAMPLE = 500
from gradtrail.stages.common.stage import run_stage
from pipeline.{0} import main
run_stage(main, "{0}")
"""


@pytest.mark.slow
def test_of_a_large_split_the_dynamics_of_a_sample_are_recorded_and_analysed(project: Project, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "project")
    dynamics = copy.folder / "results/train/dynamics.parquet"
    whole = pd.read_parquet(dynamics)
    copy.set("runtime.stream_above_mib", 0.0)
    for stage in ("train", "gradients"):
        copy.python("-c", WITH_A_SMALL_SAMPLE.format(stage))
    expected = whole.iloc[np.arange(500) * len(whole) // 500]
    sample = pd.read_parquet(dynamics)
    np.testing.assert_array_equal(sample["example_id"], expected["example_id"])
    for column in ("mean_probability", "probability_std"):  # another program, whose sums may be rounded otherwise
        np.testing.assert_allclose(sample[column], expected[column], atol=0.02)
    scores = pd.read_parquet(copy.folder / "results/gradients/scores.parquet")
    scored = scores[scores["split"] == "train"].set_index("example_id")
    assert scored.index.tolist() == sample["example_id"].tolist()
    np.testing.assert_array_equal(scored["forgetting_events"], sample["forgetting_events"])


@pytest.mark.slow
def test_diverged_training_names_the_step(project: Project, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "project")
    copy.set("train.adamw.learning_rate", 1e8)
    copy.set("train.keep_epochs", [])
    copy.set("runtime.tracking", False)
    output = copy.python("-m", "pipeline.train", status=2)
    (line,) = besides_progress(output.splitlines())
    assert line.startswith("train: training diverged: the loss of step ")
    assert (copy.folder / "models/final.safetensors").read_bytes() == (
        project.folder / "models/final.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_plots_and_metrics_for_people(project: Project, tmp_path: Path) -> None:
    project.dvc("plots", "show", "--out", str(tmp_path))
    page = (tmp_path / "index.html").read_text()
    assert all(title in page for title in ("Loss by epoch", "Accuracy by epoch", "Confusion", "Calibration"))
    assert project.dvc("exp", "show", "--csv").count("accuracy") > 0
