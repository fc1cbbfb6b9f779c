"""Histories that `test_random_histories.py` does not draw: after a sync each state has one whole run, and no other.

Each history is checked twice: as it was, and once more after the store is lost, when every run comes from the files.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from projects import Project
from whole_runs import BINS, FIRST, LR, OTHER, by_state, whole_runs


def only_some_stages_run(project: Project) -> None:
    project.set(LR, 0.5)
    project.dvc("repro", "train")
    project.git("add", "-A")  # the only lock in git has the evaluation of another training, which the run-cache knows
    project.git("commit", "-q", "--amend", "-m", "results")


def experiments_applied_branched_and_removed(project: Project) -> None:
    project.dvc("exp", "run", "-S", f"{LR}=0.5", "--name", "here")
    project.git("checkout", "-q", ".")
    project.dvc("exp", "run", "--temp", "-S", f"{BINS}=7", "--name", "there")
    project.dvc("exp", "branch", "here", "kept")
    project.dvc("exp", "apply", "there")
    project.commit("applied")
    project.dvc("exp", "remove", "here", "there")


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (only_some_stages_run, [*FIRST, "train lr"]),
        (experiments_applied_branched_and_removed, [*FIRST, *OTHER, "evaluate bins"]),
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


@pytest.mark.slow
def test_sync_with_nothing_to_do_does_not_import_mlflow(project: Project, tmp_path: Path) -> None:
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
    message = project.sync()
    assert "deleted as duplicates: 1" in message
    assert "open on other hosts: 1" in message
    assert whole_runs(project) == FIRST
    assert train["id"] in {run["id"] for run in project.runs_of("train")}
    assert project.sync().strip() == "5 runs present; open on other hosts: 1"


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
