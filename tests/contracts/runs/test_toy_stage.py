"""A new stage is a script, a folder, a params section and an entry in `dvc.yaml`: no module that was there changes."""

from pathlib import Path

import pytest
from projects import Project, finished_project
from ruamel.yaml import YAML

from gradtrail.stages.common.files import digest

CONFIG = '''
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """How often the size of the weights is written."""

    repeats: int
'''
SCRIPT = """
from pathlib import Path

from gradtrail.stages.data import data_files
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.stages.toy.config import ToyConfig
from gradtrail.tracking.live import tracked


def main(stage: Stage) -> None:
    config = stage.params(ToyConfig)
    info = data_files.read_info(Path("data/processed"))
    size = Path("models/final.safetensors").stat().st_size

    with tracked(stage) as run:
        with stage.writing_outs() as new:
            (new / "results" / "toy").mkdir(parents=True)
            (new / "results" / "toy" / "sizes.txt").write_text(f"{size}\\n" * config.repeats)
            stage.write_metrics(new, {**info.as_metrics(), "weights_bytes": size})
        run.outs()


if __name__ == "__main__":
    run_stage(main, "toy")
"""
ENTRY = {
    "cmd": "sh pipeline/stage.sh toy",
    "deps": [
        "data/processed/dataset.json",
        "models/final.safetensors",
        "pipeline/toy.py",
        "src/gradtrail/core/config.py",
        "src/gradtrail/stages/common",
        "src/gradtrail/stages/toy",
    ],
    "params": ["toy", {"pipeline/versions.yaml": ["numpy"]}],
    "outs": ["results/toy"],
    "metrics": [{"results/metrics/toy.json": {"cache": False}}],
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A copy of a finished project, with a stage more."""
    project = finished_project().copy(tmp_path / "project")
    (project.folder / "pipeline" / "toy.py").write_text(SCRIPT)
    package = project.folder / "src" / "gradtrail" / "stages" / "toy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "config.py").write_text(CONFIG)
    with (project.folder / "params.yaml").open("a") as params:
        params.write("\ntoy:\n  repeats: 2\n")
    yaml, path = YAML(), project.folder / "dvc.yaml"
    content = yaml.load(path)
    report = content["stages"].pop("report")
    report["deps"] += ["results/metrics/toy.json", "results/toy"]
    report["params"].insert(0, "toy")
    content["stages"] |= {"toy": ENTRY, "report": report}
    yaml.dump(content, path)
    return project


@pytest.mark.slow
def test_a_new_stage_runs_is_tracked_and_rebuilt(project: Project) -> None:
    assert project.ran(project.dvc("repro")) == ["toy", "report"]
    size = (project.folder / "models/final.safetensors").stat().st_size
    assert (project.folder / "results/toy/sizes.txt").read_text() == f"{size}\n" * 2
    check_runs(project, size)

    (project.folder / "mlflow.db").unlink()
    assert "toy" in project.sync()
    check_runs(project, size)

    project.git("add", "--intent-to-add", ".")
    changed = project.git("diff", "--name-status").splitlines()
    python = {line for line in changed if line.endswith(".py")}
    package = "src/gradtrail/stages/toy"
    assert python == {f"A\t{package}/__init__.py", f"A\t{package}/config.py", "A\tpipeline/toy.py"}


def check_runs(project: Project, size: int) -> None:
    """Assert that the stage has one run below its training's, and that its metric is the training's too."""
    (train,), (toy,) = project.runs_of("train"), project.runs_of("toy")
    assert toy["status"] == "FINISHED"
    assert toy["tags"]["mlflow.parentRunId"] == train["id"]
    assert toy["tags"]["train_state"] == train["tags"]["state"]
    assert toy["outs"]["results/toy"] == digest(project.folder / "results/toy")
    assert toy["params"]["toy.repeats"] == "2"
    for run in (toy, train):
        assert run["metrics"]["toy/weights_bytes"] == size
