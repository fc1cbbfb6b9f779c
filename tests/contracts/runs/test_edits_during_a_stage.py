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
WORDS = "data/words.txt"


def edit_params(project: Project) -> str:
    project.set(LR, 0.7)
    return f"params.yaml: {LR} changed from 0.005 to 0.7 while train ran"


def edit_code(project: Project) -> str:
    (project.folder / "src/gradtrail/core/second.py").write_text("WORD = 'other'\n")
    return "src/gradtrail/core/second.py changed while train ran"


def edit_upstream_out(project: Project) -> str:
    path = project.folder / WORDS
    path.unlink()  # it may be a link into the cache
    path.write_text("other words")
    return f"{WORDS} was written while train ran"


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


@pytest.mark.parametrize("edit", [edit_params, edit_code, edit_upstream_out, edit_pipeline, edit_versions])
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
    assert (after["id"], after["status"], after["outs"]) == (before["id"], "FINISHED", before["outs"])


# What is said, and commands before the stage reads its data, which have other content then, and after it
PUT_BACK = [
    (f"{WORDS} was written", "mv data/words.txt .git/a; echo other > data/words.txt", "mv .git/a data/words.txt"),
    # Into the same file, with its time
    (f"{WORDS} was written", "cp -p data/words.txt .git/a; echo other > data/words.txt", "cp -p .git/a data/words.txt"),
]


@pytest.mark.parametrize(("change", "before", "after"), PUT_BACK, ids=["replaced", "rewritten"])
def test_data_that_changed_and_were_put_back_are_not_recorded(
    project: Project, change: str, before: str, after: str
) -> None:
    expected, (run,) = contents(project), project.runs_of("train")
    (project.folder / ".git/before_reading.sh").write_text(before)
    (project.folder / ".git/after_reading.sh").write_text(after)
    output = project.dvc("repro", "--force", "--single-item", "train", status=255)
    assert f"train: {change} while train ran; its results are not recorded" in output
    assert contents(project) == expected
    (same,) = project.runs_of("train")
    assert (same["id"], same["status"], same["outs"]) == (run["id"], "FINISHED", run["outs"])


def test_an_edit_of_code_that_was_undone_costs_nothing(project: Project) -> None:
    code = "src/gradtrail/core/second.py"
    (project.folder / ".git/before_reading.sh").write_text(f"mv {code} .git/right; echo 'WORD = 1' > {code}")
    (project.folder / ".git/after_reading.sh").write_text(f"mv .git/right {code}")
    expected = contents(project)
    project.dvc("repro", "--force", "--single-item", "train")
    assert contents(project) == expected


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


def edit_too_late(project: Project) -> None:
    """Train at 0.5, and edit the rate after the training has ended, before DVC reads its params."""
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


def freeze(project: Project) -> None:
    project.dvc("freeze", "train")
    project.set(LR, 0.7)
    project.dvc("repro", "--force", "--single-item", "train")


def save_as_experiment(project: Project) -> None:
    project.set(LR, 0.7)
    project.dvc("exp", "save", "--name", "saved")


def commit_by_force(project: Project) -> None:
    project.set(LR, 0.7)
    project.dvc("commit", "--force")


def weights(project: Project) -> dict[str, str]:
    """Return the weights that the finished trainings with a learning rate wrote."""
    runs = [run for run in project.runs_of("train") if run["status"] == "FINISHED"]
    pairs = {(run["params"][LR], run["outs"]["models/final.safetensors"]) for run in runs}
    assert len({rate for rate, _ in pairs}) == len(pairs), "one learning rate gives one result"
    return dict(pairs)


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    "record", [pytest.param(edit_too_late, marks=pytest.mark.slow), freeze, save_as_experiment, commit_by_force]
)
def test_outs_that_other_params_made_have_no_run(
    project: Project, record: Callable[[Project], None], capsys: pytest.CaptureFixture[str]
) -> None:
    record(project)
    before = weights(project)
    assert "0.7" not in before
    capsys.readouterr()
    report = describe(sync())
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    made_with = "0.5" if record is edit_too_late else "0.005"
    assert f"wrote these outputs with {LR} {made_with}, not 0.7; it has no run; `dvc repro --force" in line
    assert report.endswith("recorded for other params or data than made them, so without a run: 1")
    assert weights(project) == before
    assert describe(sync()) == report, "a sync with nothing to do says it too"

    if record is save_as_experiment:
        project.dvc("exp", "remove", "saved")
    project.dvc("unfreeze", "train")
    project.dvc("repro", "--force", "--single-item", "train")
    assert "without a run" not in describe(sync())
    after = weights(project)
    assert before.items() < after.items()
    assert after["0.7"] not in before.values()


@pytest.mark.slow
def test_a_rebuilt_run_is_replaced_once_an_execution_contradicts_it(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    commit_by_force(project)
    project.commit("a lock that names another learning rate")
    project.empty_store()
    sync()  # nothing tells which of two commits is right
    assert weights(project)["0.7"] == weights(project)["0.005"]
    project.set(LR, 0.005)
    project.dvc("repro", "--force", "--single-item", "train")
    assert "replaced by other runs: 1" in describe(sync()), "the other one gave way to the run of the execution"
    assert weights(project).keys() == {"0.005"}
