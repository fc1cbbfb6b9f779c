"""What the finished runs of the small project are of, and what must hold of all its runs."""

from typing import Any

from projects import Project

from gradtrail.stages.common.digests import digest

LR, CLIP, BINS, TOP = (
    "train.adamw.learning_rate",
    "train.clip_norm",
    "evaluate.calibration_bins",
    "gradients.top_fraction",
)
FIRST = ["evaluate", "fetch", "gradients", "train"]
OTHER = ["evaluate lr", "gradients lr", "train lr"]


def whole_runs(project: Project) -> list[str]:
    """Return what the finished runs are of, sorted: stage, and which params are not the first ones.

    Asserts what holds of all runs: none is open; each state has one; each is complete, and hangs below its training.
    """
    runs = [run for run in project.runs() if run["tags"].get("process") != "elsewhere:1"]
    assert "RUNNING" not in {run["status"] for run in runs}
    whole = [run for run in runs if run["status"] == "FINISHED"]
    assert len({run["tags"]["state"] for run in runs}) == len(runs)
    trainings = {run["tags"]["state"]: run for run in whole if run["tags"]["stage"] == "train"}
    by_id = {run["id"]: run for run in whole}
    for run in whole:
        stage = run["tags"]["stage"]
        assert run["params"]
        assert (run["artifacts"] / "lineage.json").is_file()
        if stage == "train":
            weights = run["outs"]["models/final.safetensors"]
            assert digest(project.folder / ".dvc/cache/files/md5" / weights[:2] / weights[2:]) == weights
            assert not (run["artifacts"] / "models").exists(), "the weights are DVC's"
        if stage in ("evaluate", "gradients"):
            parent = by_id[run["tags"]["mlflow.parentRunId"]]
            assert parent is trainings[run["tags"]["train_state"]]
            assert parent["outs"]["models/final.safetensors"] == run["tags"]["weights"]
            assert (run["artifacts"] / "results/words.txt").is_file()
    return sorted(label(run) for run in whole)


def label(run: dict[str, Any]) -> str:
    first = {LR: ("lr", "0.005"), CLIP: ("clip", "1.0"), BINS: ("bins", "15"), TOP: ("top", "0.01")}
    changed = [short for key, (short, value) in first.items() if run["params"].get(key, value) != value]
    return " ".join([run["tags"]["stage"], *changed])


def by_state(project: Project) -> dict[str, dict[str, float]]:
    """Return the metrics of each whole run."""
    return {run["tags"]["state"]: run["metrics"] for run in project.runs() if run["status"] == "FINISHED"}
