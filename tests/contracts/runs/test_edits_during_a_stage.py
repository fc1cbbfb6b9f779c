"""Inputs that change while a stage runs: its results are recorded for the inputs that made them, or not at all."""

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from projects import Project
from small_project import finished_small_project

from gradtrail.tracking.sync import describe, sync

LR = "train.adamw.learning_rate"
WORDS, CODE = "data/words.txt", "src/gradtrail/core/second.py"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return finished_small_project().copy(tmp_path_factory.mktemp("edits") / "project")


@pytest.fixture
def unchanged(shared: Project) -> Iterator[Project]:
    """A finished project whose results no test changes; its inputs are put back after each."""
    content = (words := shared.folder / WORDS).read_text()
    yield shared
    shared.git("checkout", "-q", ".")
    words.unlink()  # it may be a link into the cache
    words.write_text(content)


def train_with_edits(project: Project, before: str, after: str, *, status: int) -> str:
    """Train, with commands before and after the stage reads its data; return what was printed."""
    for when, script in (("before", before), ("after", after)):
        (project.folder / f".git/{when}_reading.sh").write_text(script)
    return project.dvc("repro", "--force", "--single-item", "train", status=status)


def contents(project: Project) -> dict[str, Any]:
    """Return what DVC recorded, the digest of each out, and what identifies the training's run."""
    folders = ("data", "models", "results")
    outs = [path for name in folders for path in (project.folder / name).rglob("*") if path.is_file()]
    (run,) = project.runs_of("train")
    return project.digests(*(path.relative_to(project.folder).as_posix() for path in outs)) | {
        "lock": project.lock(),
        "run-cache": sorted(path.name for path in (project.folder / ".dvc/cache/runs").glob("??/*/*")),
        "run": [run[key] for key in ("id", "status", "outs")],
    }


# What is said, and commands before the stage reads its data and after it
EDITS = {
    "params": (
        f"params.yaml: {LR} changed from 0.005 to 0.7 while train ran",
        "sed -i '/^  adamw:/,/learning_rate:/ s/learning_rate: .*/learning_rate: 0.7/' params.yaml",
        "",
    ),
    "code": (f"{CODE} changed while train ran", f"echo \"WORD = 'other'\" > {CODE}", ""),
    "upstream out": (f"{WORDS} was written while train ran", f"rm {WORDS}; echo other > {WORDS}", ""),
    "pipeline": (
        "dvc.yaml: stage train changed while train ran",
        r"sed -i 's|^\( *- \)pipeline/train.py|&\n\1src/gradtrail/support/errors.py|' dvc.yaml",
        "",
    ),
    "versions": (
        "a file that it reads changed (pipeline/versions.yaml: it has numpy 1.0.0",
        "sed -i 's/^numpy:/numpy: 1.0.0 #/' pipeline/versions.yaml",
        "",
    ),
    "replaced and put back": (
        f"{WORDS} was written while train ran",
        f"mv {WORDS} .git/a; echo other > {WORDS}",
        f"mv .git/a {WORDS}",
    ),
    "rewritten, with its time": (
        f"{WORDS} was written while train ran",
        f"cp -p {WORDS} .git/a; echo other > {WORDS}",
        f"cp -p .git/a {WORDS}",
    ),
}


@pytest.mark.parametrize(("message", "before", "after"), EDITS.values(), ids=EDITS)
def test_results_of_other_inputs_are_not_recorded(message: str, before: str, after: str, unchanged: Project) -> None:
    """Of the training; other stages are edited in `test_random_histories.py`."""
    expected = contents(unchanged)
    output = train_with_edits(unchanged, before, after, status=255)
    (line,) = [line for line in output.splitlines() if line.startswith("train: ")]
    assert line.startswith(f"train: {message}")
    assert "Traceback" not in output
    actual = contents(unchanged)
    changed = {WORDS} if "rm " in before else set()
    assert {key for key in expected if actual[key] != expected[key]} == changed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"mv {CODE} .git/right; echo 'WORD = 1' > {CODE}", f"mv .git/right {CODE}"),
        ("sed -i 's/calibration_bins: .*/calibration_bins: 7/' params.yaml", ""),
    ],
    ids=["code, undone", "params of another stage"],
)
def test_an_edit_that_changes_no_input_costs_nothing(before: str, after: str, unchanged: Project) -> None:
    expected = contents(unchanged)
    train_with_edits(unchanged, before, after, status=0)
    assert contents(unchanged) == expected


def test_code_that_changes_while_a_stage_starts_is_refused(project: Project) -> None:
    script = project.folder / "pipeline/train.py"
    late = "import time\nopen('.git/starting', 'w').close()\ntime.sleep(1)\n"
    script.write_text(script.read_text().replace("import functools\n", f"import functools\n{late}", 1))
    process = project.start_dvc("repro", "train")
    while not (project.folder / ".git/starting").exists():
        time.sleep(0.01)
    time.sleep(0.1)  # a real Python takes longer than this to start; the warm one would be edited within a clock tick
    (project.folder / CODE).write_text("WORD = 'other'\n")
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"train: {CODE} changed while train was starting; run it again" in output


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
    "record",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in (edit_too_late, freeze, save_as_experiment)),
        commit_by_force,
    ],
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
