"""Whatever happened before, after a sync MLflow has one whole run for each state that was made, and no other.

Each history is told twice: as it was, and once more after the store is lost, when every run has to come from the files.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from projects import Project, stop
from ruamel.yaml import YAML

from gradtrail.stages.common.digests import digest

LR, CLIP, BINS, TOP = (
    "train.adamw.learning_rate",
    "train.clip_norm",
    "evaluate.calibration_bins",
    "gradients.top_fraction",
)
FIRST = ["evaluate", "fetch", "gradients", "train"]
OTHER = ["evaluate lr", "gradients lr", "train lr"]


def nothing_to_do(project: Project) -> None:
    assert project.ran(project.dvc("repro")) == []


def only_one_stage_changed_at_a_time(project: Project) -> None:
    project.set(BINS, 7)
    assert project.ran(project.dvc("repro")) == ["evaluate"]
    project.set(TOP, 0.5)
    assert project.ran(project.dvc("repro")) == ["gradients"]


def other_params_of_the_same_bytes(project: Project) -> None:
    project.set(CLIP, 5.0)  # which the small stage does not look at
    assert project.ran(project.dvc("repro")) == ["train"]


def forced(project: Project) -> None:
    project.dvc("repro", "--force")


def restored_from_the_run_cache(project: Project) -> None:
    project.set(LR, 0.5)
    project.dvc("repro")
    for value in (0.005, 0.5):
        project.set(LR, value)
        assert project.ran(project.dvc("repro")) == []


def only_some_stages_run(project: Project) -> None:
    project.set(LR, 0.5)
    project.dvc("repro", "train")
    project.git("add", "-A")  # the only lock in git has the evaluation of another training, which the run-cache knows
    project.git("commit", "-q", "--amend", "-m", "results")


def killed(project: Project) -> None:
    project.set(LR, 0.5)
    with project.holding("train") as has_begun:
        stop(project.start(sys.executable, "-m", "dvc", "repro"), signal.SIGKILL, when=has_begun)
        assert has_begun()


def killed_under_force(project: Project) -> None:
    """The run was whole before; the lock still names its state, whose outs are gone from the working folder."""
    with project.holding("train") as has_begun:
        stop(project.start(sys.executable, "-m", "dvc", "repro", "--force"), signal.SIGKILL, when=has_begun)
        assert has_begun()


def killed_before_the_log(project: Project) -> None:
    """When the outs are in place: train, which DVC makes again, and evaluate, whose outs are committed as they are."""
    project.set(LR, 0.5)
    code = project.folder / "src/gradtrail/tracking/mlflow/run.py"
    whole, begin = code.read_text(), "    def outs(self) -> None:\n"
    for stage in ("train", "evaluate"):
        (there := project.folder / ".gradtrail" / stage).unlink(missing_ok=True)
        wait = f"self.stage.name == {stage!r} and (open('.gradtrail/{stage}', 'w').close(), time.sleep(600))"
        code.write_text(whole.replace(begin, f"{begin}        import time; {wait}\n"))

        def is_before_the_log(stage: str = stage, there: Path = there) -> bool:  # and the tracker has opened the run
            return there.exists() and [run["status"] for run in project.runs_of(stage)] == ["RUNNING", "FINISHED"]

        process = project.start(sys.executable, "-m", "dvc", "repro", stage)
        output, _ = stop(process, signal.SIGKILL, when=is_before_the_log)
        assert process.returncode == -signal.SIGKILL, output
    code.write_text(whole)
    project.dvc("commit", "--force", "evaluate")
    project.sync()
    assert project.ran(project.dvc("repro")) == ["gradients"]


def queue_of_two_workers(project: Project) -> None:
    project.dvc("exp", "run", "--queue", "-S", f"{CLIP}=0.25,0.75")
    project.start_queue(2)
    status = project.wait_for_queue()
    assert status.count("Success") == 2, status


def experiments_applied_branched_and_removed(project: Project) -> None:
    project.dvc("exp", "run", "-S", f"{LR}=0.5", "--name", "here")
    project.git("checkout", "-q", ".")
    project.dvc("exp", "run", "--temp", "-S", f"{BINS}=7", "--name", "there")
    project.dvc("exp", "branch", "here", "kept")
    project.dvc("exp", "apply", "there")
    project.commit("applied")
    project.dvc("exp", "remove", "here", "there")


slow, nightly = pytest.mark.slow, pytest.mark.nightly


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        pytest.param(nothing_to_do, FIRST, marks=slow),
        pytest.param(only_one_stage_changed_at_a_time, [*FIRST, "evaluate bins", "gradients top"], marks=slow),
        pytest.param(other_params_of_the_same_bytes, [*FIRST, "train clip"], marks=slow),
        pytest.param(forced, FIRST, marks=slow),
        pytest.param(restored_from_the_run_cache, FIRST + OTHER, marks=slow),
        pytest.param(only_some_stages_run, [*FIRST, "train lr"], marks=slow),
        pytest.param(killed, FIRST, marks=slow),
        pytest.param(killed_under_force, FIRST, marks=slow),
        pytest.param(killed_before_the_log, FIRST + OTHER, marks=nightly),
        pytest.param(queue_of_two_workers, [*FIRST, "train clip", "train clip"], marks=nightly),
        pytest.param(experiments_applied_branched_and_removed, [*FIRST, *OTHER, "evaluate bins"], marks=slow),
    ],
)
def test_after_a_sync_each_state_has_one_run(
    project: Project, history: Callable[[Project], None], expected: list[str]
) -> None:
    history(project)
    project.sync()
    assert whole_runs(project) == sorted(expected)
    before = by_state(project)
    project.empty_store()
    project.sync()
    assert whole_runs(project) == sorted(expected)
    assert by_state(project) == before
    assert all(run["tags"]["rebuilt"] == "true" for run in project.runs())


@slow
def test_a_killed_run_that_goes_on_has_one_run(project: Project) -> None:
    killed(project)
    project.sync()
    assert [run["status"] for run in project.runs_of("train")] == ["KILLED", "FINISHED"]
    project.dvc("repro")
    project.sync()
    assert whole_runs(project) == sorted(FIRST + OTHER)
    assert [run["status"] for run in project.runs_of("train")] == ["FINISHED", "FINISHED"]


@slow
def test_a_clone_with_a_cache_has_the_runs_of_all_branches(project: Project, tmp_path: Path) -> None:
    project.git("checkout", "-qb", "other")
    project.set(LR, 0.5)
    project.dvc("repro")
    project.commit("another learning rate")
    project.git("checkout", "-q", "-")
    before = by_state(project)
    project.run("git", "clone", "-q", str(project.folder), str(tmp_path / "clone"))
    clone = Project(tmp_path / "clone")
    assert "not here" not in clone.sync()  # what a fresh clone lacks is told to who asks
    assert "states whose files are not here: 7" in clone.gradtrail("sync", "-v")
    shutil.copytree(project.folder / ".dvc/cache/files", clone.folder / ".dvc/cache/files")
    assert "rebuilt: fetch, train (2), evaluate (2), gradients (2)" in clone.sync()
    assert whole_runs(clone) == sorted(FIRST + OTHER)
    assert by_state(clone) == before
    commits = {run["tags"]["mlflow.source.git.commit"] for run in clone.runs() if run["params"].get(LR) == "0.5"}
    assert commits == {clone.git("rev-parse", "origin/other").strip()}
    assert not (clone.folder / "models/final.safetensors").exists(), "a sync leaves the working folder alone"


@nightly
def test_twenty_commits_are_brought_into_an_empty_store(project: Project) -> None:
    for number in range(20):
        commit_as_if_run(project, f"{number + 1}.0")
    project.git("checkout", "-q", "HEAD~3")
    (project.folder / "mlflow.db").unlink()
    assert "rebuilt: fetch, train (21), evaluate (21), gradients\n" in project.sync()
    assert len(whole_runs(project)) == 44
    assert project.sync() == "44 runs present\n"


@pytest.mark.slow
def test_a_sync_with_nothing_to_do_leaves_mlflow_alone(project: Project, tmp_path: Path) -> None:
    """Proven by a module of that name that cannot be imported; and it is asked again after any change that matters."""
    (tmp_path / "poison" / "mlflow").mkdir(parents=True)
    (tmp_path / "poison/mlflow/__init__.py").write_text("raise RuntimeError('MLflow is imported')\n")
    path = f"{project.folder / 'src'}:{tmp_path / 'poison'}"
    store, cache = project.folder / "mlflow.db", project.folder / ".dvc/cache/files/md5"

    def says() -> str:
        process = project.start(sys.executable, "-m", "gradtrail", "sync", env={"PYTHONPATH": path})
        return process.communicate(timeout=300)[0]

    assert "MLflow is imported" in says()
    project.sync()
    assert says() == "4 runs present\n"
    time_of_store = store.stat().st_mtime_ns
    changes: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: project.git("commit", "--allow-empty", "-qm", "x"), lambda: project.git("reset", "-q", "HEAD~1")),
        (lambda: project.git("tag", "some"), lambda: project.git("tag", "-d", "some")),
        (store.touch, lambda: os.utime(store, ns=(time_of_store, time_of_store))),
        ((cache / "zz").mkdir, (cache / "zz").rmdir),
    ]
    for change, change_back in changes:
        change()
        assert "MLflow is imported" in says()
        change_back()
        assert says() == "4 runs present\n"


STRANGE_RUNS = """
from gradtrail.tracking.mlflow.client import experiment_id, open_store
client = open_store()
(run,) = client.search_runs([experiment_id(client, "models")], "tags.stage = 'train'")
twin = client.create_run(run.info.experiment_id, tags=run.data.tags)
client.set_terminated(twin.info.run_id)
elsewhere = {"state": "0", "stage": "train", "process": "elsewhere:1"}
client.create_run(run.info.experiment_id, tags=elsewhere)
"""


@slow
def test_runs_of_two_clones_and_of_other_hosts(project: Project) -> None:
    """Two clones that share a server may each make a run of a state; the older stays. Other hosts' runs are theirs."""
    (train,) = project.runs_of("train")
    project.python("-c", STRANGE_RUNS)
    said = project.sync()
    assert "deleted as duplicates: 1" in said
    assert "open on other hosts: 1" in said
    assert whole_runs(project) == FIRST
    assert train["id"] in {run["id"] for run in project.runs_of("train")}
    assert project.sync().strip() == "4 runs present; open on other hosts: 1"


def test_commits_of_another_shape_are_passed_over(project: Project) -> None:
    lock = project.lock()
    for content in (b"schema: '2.0'\nstages:\n  fetch: 3\n", b"<<<<<<< HEAD\n", b"stages:\n  other: {cmd: run}\n"):
        (project.folder / "dvc.lock").write_bytes(content)
        project.commit("odd")
    (project.folder / "dvc.lock").write_bytes(lock)
    assert project.sync().endswith("4 runs present; skipped, not readable: 2\n")
    assert whole_runs(project) == FIRST


@slow
def test_a_run_says_what_was_changed_in_what_matters(project: Project) -> None:
    clean = project.runs_of("evaluate")[0]
    assert clean["tags"]["git.dirty"] == "true", "no .gitignore of an out was in git at the first run"
    project.dvc("repro", "--force", "--single-item", "evaluate")
    assert project.runs_of("evaluate")[0]["tags"]["git.dirty"] == "false"
    project.set(BINS, 7)
    (project.folder / "notes.txt").write_text("x")
    project.dvc("repro")
    run = project.runs_of("evaluate")[0]
    assert run["tags"]["git.dirty"] == "true"
    diff = (run["artifacts"] / "git.diff").read_text()
    assert "+  calibration_bins: 7" in diff
    assert "diff --git a/notes.txt b/notes.txt" in diff
    assert "dvc.lock" not in diff


@slow
def test_runs_hold_the_weights_where_params_ask_for_it(project: Project) -> None:
    weights = (project.folder / "models/final.safetensors").read_bytes()
    project.set("runtime.copy_outs", True)
    (project.folder / "mlflow.db").unlink()
    shutil.rmtree(project.folder / "models")
    project.sync()
    (run,) = project.runs_of("train")
    assert [path.name for path in (run["artifacts"] / "models").iterdir()] == ["final.safetensors"]
    assert (run["artifacts"] / "models/final.safetensors").read_bytes() == weights


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


def commit_as_if_run(project: Project, learning_rate: str) -> None:
    """Commit what a repro with this learning rate would leave, with other bytes for each, gradients aside."""
    yaml = YAML()
    lock = yaml.load(project.folder / "dvc.lock")
    stages = lock["stages"]
    stages["train"]["params"]["params.yaml"]["train"]["adamw"]["learning_rate"] = float(learning_rate)
    weights = into_cache(project, f"weights {learning_rate}")
    stages["evaluate"]["deps"][0]["md5"] = weights
    contents = {
        "models/final.safetensors": f"weights {learning_rate}",
        "results/evaluate/words.txt": f"words {learning_rate}",
        "metrics/train.json": json.dumps({"dataset": "words", "dataset_digest": "0" * 64, "length": 1}),
        "metrics/evaluate.json": json.dumps({"dataset": "words", "dataset_digest": "0" * 64, "length": 2}),
    }
    for stage in ("train", "evaluate"):
        for out in stages[stage]["outs"]:
            out["md5"] = into_cache(project, contents[out["path"]])
    stages.pop("gradients", None)
    yaml.dump(lock, project.folder / "dvc.lock")
    project.commit(f"with {learning_rate}")


def into_cache(project: Project, content: str) -> str:
    beside = project.folder / ".outs" / "content"
    beside.write_text(content)
    md5 = digest(beside)
    target = project.folder / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    target.parent.mkdir(exist_ok=True)
    shutil.move(beside, target)
    return md5


@slow
def test_a_commit_whose_code_wrote_the_same_bytes_gets_no_run_made(project: Project) -> None:
    """As in a fresh clone, whose history has many states that differ in code alone, after its first run."""
    core = project.folder / "src/gradtrail/core/second.py"
    core.write_text(core.read_text() + "# a word to the reader\n")
    project.dvc("repro")
    project.commit("edited")
    (edited, _) = (run["tags"]["state"] for run in project.runs_of("train"))
    (project.folder / "mlflow.db").unlink()
    project.dvc("repro", "--force")
    project.sync()
    assert [run["tags"]["state"] for run in project.runs_of("train")] == [edited]
