"""Inputs that change while a stage runs: its results are recorded for the inputs that made them, or not at all."""

import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from projects import Project, warm
from ruamel.yaml import YAML
from warm_python import warm_python

from gradtrail.tracking.sync import describe, sync

LR = "train.adamw.learning_rate"
LR_CHANGED = f"params.yaml: {LR} changed from 0.005 to 0.7 while train ran"
WORDS = "data/words.txt"


def edit_params(project: Project) -> str:
    project.set(LR, 0.7)
    return LR_CHANGED


def edit_code(project: Project) -> str:
    (project.folder / "src/gradtrail/core/second.py").write_text("WORD = 'other'\n")
    return "src/gradtrail/core/second.py changed while train ran"


def edit_upstream_out(project: Project) -> str:
    path = project.folder / WORDS
    path.unlink()  # it may be a link into the cache
    path.write_text("other words")
    return f"{WORDS} changed while train ran"


def edit_pipeline(project: Project) -> str:
    path = project.folder / "dvc.yaml"
    content = YAML().load(path)
    content["stages"]["train"]["deps"].append("src/gradtrail/support/errors.py")
    YAML().dump(content, path)
    return "dvc.yaml: stage train changed while train ran"


def edit_versions(project: Project) -> str:
    path = project.folder / "pipeline/versions.yaml"
    path.write_text(path.read_text().replace("numpy:", "numpy: 1.0.0 #"))
    return "a file that it reads changed (pipeline/versions.yaml: it has numpy 1.0.0"


def check_out_another_branch(project: Project) -> str:
    project.git("checkout", "-q", "other")
    return LR_CHANGED


@pytest.fixture
def project(project: Project) -> Project:
    """The small project with another branch, whose stages wait while `.git/hold` exists."""
    project.git("checkout", "-qb", "other")
    project.set(LR, 0.7)
    project.commit("other params")
    project.git("checkout", "-q", "-")
    return project


def start_repro(project: Project, *arguments: str) -> subprocess.Popen[str]:
    return project.start(str(warm_python()), "-m", "dvc", "repro", *arguments, env=warm())


def repro_with_edit(project: Project, edit: Callable[[], Any]) -> tuple[int, str]:
    """Train, edit once the run is open, let it end; return the exit status and what was printed."""
    hold = project.folder / ".git" / "hold"
    hold.touch()
    process = start_repro(project, "--force", "--single-item", "train")
    while not any(run["status"] == "RUNNING" for run in project.runs()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    edit()
    hold.unlink()
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def contents(project: Project) -> dict[str, Any]:
    folders = ("data", "models", "results")
    outs = [path for name in folders for path in (project.folder / name).rglob("*") if path.is_file()]
    return project.digests(*(path.relative_to(project.folder).as_posix() for path in outs)) | {
        "lock": project.lock(),
        "run-cache": run_cache(project),
    }


def run_cache(project: Project) -> list[str]:
    return sorted(path.name for path in (project.folder / ".dvc/cache/runs").glob("??/*/*"))


@pytest.mark.parametrize(
    "edit", [edit_params, edit_code, edit_upstream_out, edit_pipeline, edit_versions, check_out_another_branch]
)
def test_results_of_other_inputs_are_not_recorded(project: Project, edit: Callable[[Project], str]) -> None:
    """Of the training; other stages are edited in `test_random_histories.py`."""
    (before,) = project.runs_of("train")
    expected, messages = contents(project), list[str]()
    status, output = repro_with_edit(project, lambda: messages.append(edit(project)))
    assert status == 255
    (line,) = [line for line in output.splitlines() if line.startswith("train: ")]
    assert line.startswith(f"train: {messages[0]}")
    assert "Traceback" not in output
    changed = {WORDS} if edit is edit_upstream_out else set()
    assert {path for path, actual in contents(project).items() if actual != expected[path]} == changed
    (after,) = project.runs_of("train")
    assert (after["id"], after["status"], after["outs"]) == (before["id"], "FAILED", before["outs"])


def test_an_edit_of_another_stages_params_costs_nothing(project: Project) -> None:
    status, output = repro_with_edit(project, lambda: project.set("evaluate.calibration_bins", 7))
    assert status == 0, output
    assert [run["status"] for run in project.runs_of("train")] == ["FINISHED"]


def test_code_that_changes_while_a_stage_starts_is_refused(project: Project) -> None:
    script = project.folder / "pipeline/train.py"
    late = "import time\nopen('.git/starting', 'w').close()\ntime.sleep(1)\n"
    script.write_text(script.read_text().replace("import functools\n", f"import functools\n{late}", 1))
    process = start_repro(project, "train")
    while not (project.folder / ".git/starting").exists():
        time.sleep(0.01)
    time.sleep(0.1)  # a real Python takes longer than this to start; the warm one would be edited within a clock tick
    edit_code(project)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "train: src/gradtrail/core/second.py changed while train was starting; run it again" in output


@pytest.fixture
def edited_too_late(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose learning rate was edited after a training at 0.5 had ended, before DVC read its params."""
    script = project.folder / "pipeline/train.py"
    edit = "    if Path('.git/late').exists():\n        Path('.git/late').replace('params.yaml')\n"
    script.write_text(script.read_text().replace("\n\nif __name__", f"{edit}\n\nif __name__", 1))
    project.dvc("repro")
    project.set(LR, 0.7)
    shutil.copy(project.folder / "params.yaml", project.folder / ".git/late")
    project.set(LR, 0.5)
    project.dvc("repro", "--single-item", "train")
    assert project.get(LR) == 0.7
    assert b"learning_rate: 0.7" in project.lock()
    monkeypatch.chdir(project.folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return project


def weights(project: Project) -> dict[str, str]:
    """Return the weights that the finished trainings with a learning rate wrote."""
    runs = [run for run in project.runs_of("train") if run["status"] == "FINISHED"]
    pairs = {(run["params"][LR], run["outs"]["models/final.safetensors"]) for run in runs}
    assert len({rate for rate, _ in pairs}) == len(pairs), "one learning rate gives one result"
    return dict(pairs)


def test_sync_does_not_believe_a_record_that_was_edited_too_late(
    edited_too_late: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project, entries = edited_too_late, run_cache(edited_too_late)
    before = weights(project)
    sync()
    assert "contradicts run" in capsys.readouterr().err
    assert weights(project) == before
    assert before.keys() == {"0.005", "0.5"}
    assert len(run_cache(project)) == len(entries) - 1
    project.dvc("repro", "--force", "--single-item", "train")
    sync()
    assert len({*weights(project).values()}) == 3


def test_sync_keeps_the_run_of_an_execution_and_removes_that_of_a_wrong_record(edited_too_late: Project) -> None:
    project = edited_too_late
    project.commit("a lock that names the wrong learning rate")
    shutil.rmtree(project.folder / ".dvc/cache/runs")  # nothing tells when DVC recorded it
    sync()
    assert weights(project)["0.7"] == weights(project)["0.5"]
    project.dvc("repro", "--force", "--single-item", "train")
    assert "replaced by other runs: 1" in describe(sync())
    assert weights(project)["0.7"] == project.digests("models/final.safetensors")["models/final.safetensors"]
    assert len({*weights(project).values()}) == 3


def test_refused_stage_restores_its_outputs(project: Project) -> None:
    """DVC removes them before the stage can refuse anything."""
    expected = contents(project)
    project.set(LR, 0.7)
    edit_versions(project)
    output = project.dvc("repro", "--single-item", "train", status=255)
    assert "train: pipeline/versions.yaml: it has numpy 1.0.0" in output
    assert contents(project) == expected
