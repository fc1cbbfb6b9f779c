"""DVC and MLflow together, on a small pipeline of the real one's shape: what runs, what is kept, which run is whose."""

import sys
from pathlib import Path
from typing import Any

import pytest
from projects import Project

from gradtrail.tracking.dvc_history import working_snapshot
from gradtrail.tracking.state import RecordedState, WorkingState
from gradtrail.tracking.tags import TRAININGS

LR = "train.adamw.learning_rate"


def test_runs_are_linked(finished: Project) -> None:
    (train,) = finished.runs_of("train")
    for stage in ("evaluate", "gradients"):
        (child,) = finished.runs_of(stage)
        assert child["tags"]["mlflow.parentRunId"] == train["id"]
        assert child["tags"]["weights"] == train["outs"]["models/final.safetensors"]
    assert train["name"] == "mlp adamw digits · seed 0"
    assert train["metrics"]["eval/loss"] == 2
    assert train["metrics"]["gradients/grad_norm_median"] == 4
    assert train["params"]["fetch.dataset"] == "digits"
    assert train["params"]["train.mlp.hidden"] == "[256, 128]"
    assert {run["status"] for run in finished.runs()} == {"FINISHED"}


def test_a_day_of_work_leaves_one_run_for_each_state(project: Project) -> None:
    """What ran has a run at once, and a new store has all of them again."""
    lock, (first,) = project.lock(), project.runs_of("train")
    assert project.ran(project.dvc("repro")) == []
    project.set(LR, 0.5)
    assert project.ran(project.dvc("repro")) == ["train", "evaluate", "gradients"]
    project.commit("another learning rate")
    project.set(LR, 5.0e-3)
    assert project.ran(project.dvc("repro")) == []
    assert project.lock() == lock, "DVC restored the outputs"
    project.set("evaluate.calibration_bins", 9)
    assert project.ran(project.dvc("repro")) == ["evaluate"]
    assert project.runs_of("evaluate")[0]["tags"]["mlflow.parentRunId"] == first["id"]
    assert next(run for run in project.runs_of("train") if run["id"] == first["id"])["metrics"]["eval/loss"] == 1
    project.commit("fewer bins")
    project.set("train.clip_norm", 5.0)  # which the small stage does not look at
    assert project.ran(project.dvc("repro")) == ["train"]
    assert project.runs_of("train")[0]["metrics"]["eval/loss"] == 1, "of the same bytes"
    project.commit("other norms")
    project.set("train.seed", 1)
    project.dvc("repro")
    project.commit("another seed")
    (parent,) = (run for run in project.runs() if TRAININGS in run["tags"])
    assert parent["name"] == "mlp adamw digits · 2 seeds"

    number = len(project.runs()) - 1
    assert project.sync() == f"{number} runs present\n"
    before = shown(project)
    assert len(before) == number + 1
    project.empty_store()
    project.sync()
    assert shown(project) == before
    assert project.sync() == f"{number} runs present\n"


def shown(project: Project) -> dict[str, Any]:
    """Return what MLflow shows of each state, and of the parent of two seeds."""
    return {run["tags"].get("state", ""): (run["params"], run["metrics"], run["outs"]) for run in project.runs()}


@pytest.mark.nightly
def test_queued_experiments_run_the_code_they_were_queued_with(project: Project) -> None:
    core = project.folder / "src/gradtrail/core/second.py"
    project.dvc("exp", "run", "--queue", "-S", "train.adamw.learning_rate=0.25,0.75")
    core.write_text("WORD = 'edited after queueing'\n")
    project.start_queue(2)
    status = project.wait_for_queue()
    assert status.count("Success") == 2, status
    runs = [run for run in project.runs_of("train") if run["tags"].get("dvc.exp_name")]
    assert {run["params"]["train.adamw.learning_rate"] for run in runs} == {"0.25", "0.75"}
    for experiment in (run["tags"]["dvc.exp_name"] for run in runs):
        project.git("checkout", "-q", "--", ".")
        project.dvc("exp", "apply", experiment)
        words = (project.folder / "models/final.safetensors").read_text().split()
        assert words[2] == "second", "a queued experiment ran the workspace's code instead of its own"


def test_state_of_an_earlier_stage_is_that_of_its_files(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stages before it, what made the files counts; of any other, what the params say now."""
    monkeypatch.chdir(project.folder)
    made = RecordedState("train", snapshot=working_snapshot()).state
    assert WorkingState("train").state == made
    project.set("train.adamw.learning_rate", 0.5)
    assert WorkingState("evaluate").state_of("train") == made
    assert WorkingState("fetch").state_of("train") == WorkingState("train").state != made
    (project.folder / "models/final.safetensors").write_text("by hand")
    assert WorkingState("evaluate").state_of("train") != made


@pytest.mark.slow
def test_an_evaluation_of_other_weights_is_not_that_of_the_training(project: Project) -> None:
    weights = project.folder / "models/final.safetensors"
    weights.unlink()
    weights.write_text("of another training")
    project.set("evaluate.calibration_bins", 7)
    assert project.ran(project.dvc("repro", "--single-item", "evaluate")) == ["evaluate"]
    assert "mlflow.parentRunId" not in project.runs_of("evaluate")[0]["tags"]
    project.dvc("repro", "--force", "train")
    (train,) = project.runs_of("train")
    assert train["metrics"]["eval/loss"] == 2, "of the evaluation with 15 bins"


def repro_in_a_shell(project: Project, stage: str, **env: str) -> tuple[int, str]:
    """Force a stage by the command `dvc`, with a Python that is not warm; return status and output."""
    command = (str(Path(sys.executable).with_name("dvc")), "repro", "--force", "--single-item", stage)
    process = project.start(*command, env=env)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def test_modules_in_the_root_and_a_safe_path_change_nothing(project: Project) -> None:
    for name in ("jax", "numpy", "pydantic", "mlflow", "json", "filelock"):
        (project.folder / f"{name}.py").write_text("raise ImportError('of the root')\n")
    (run,) = project.runs_of("evaluate")
    status, output = repro_in_a_shell(project, "evaluate", PYTHONSAFEPATH="1", JAX_PLATFORMS="cpu")
    assert status == 0, output
    assert "warning" not in output
    assert [(one["id"], one["tags"]["attempts"]) for one in project.runs_of("evaluate")] == [(run["id"], "2")]


def test_code_that_cannot_be_imported_leaves_the_outs(project: Project) -> None:
    outs = project.digests("results/evaluate/words.txt", "results/metrics/evaluate.json")
    (project.folder / "src/gradtrail/core/third.py").write_text("def f(:\n")
    status, output = repro_in_a_shell(project, "evaluate")
    assert status == 255
    assert output.count("SyntaxError") == 1
    assert project.digests(*outs) == outs
