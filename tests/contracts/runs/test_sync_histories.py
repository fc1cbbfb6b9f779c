"""What `test_random_histories.py` does not draw: clones, servers, foreign commits, and what a rebuilt run has."""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from projects import Project

from gradtrail.stages.common.dvc_cache import cached_path
from gradtrail.stages.common.files import digest, read_json, write_json
from gradtrail.tracking.dvc_history import consistent_stages, recorded_origin, snapshot_of
from gradtrail.tracking.sync import describe, sync

LR, WEIGHTS = "train.adamw.learning_rate", "models/final.safetensors"


def metrics(project: Project) -> dict[str, dict[str, float]]:
    return {run["tags"]["state"]: run["metrics"] for run in project.runs()}


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
from gradtrail.tracking.store import experiment_id, open_store
client = open_store()
(run,) = client.search_runs([experiment_id(client, "models")], "tags.stage = 'train'")
twin = client.create_run(run.info.experiment_id, tags=run.data.tags)
client.set_terminated(twin.info.run_id)
elsewhere = {"state": "0", "stage": "train", "mlflow.gradtrail.process": "elsewhere:1:1"}
client.create_run(run.info.experiment_id, tags=elsewhere)
"""


@pytest.mark.slow
def test_runs_of_two_clones_and_of_other_hosts(project: Project) -> None:
    """Two clones that share a server may each make a run of a state; the older stays. Other hosts' runs are theirs."""
    (train,) = project.runs_of("train")
    project.python("-c", STRANGE_RUNS)
    message = project.sync()
    assert "replaced by other runs: 1" in message
    assert "open on other hosts: 1" in message
    assert train["id"] in {run["id"] for run in project.runs_of("train")}
    assert project.sync().strip() == "5 runs present; open on other hosts: 1"


@pytest.mark.slow
def test_runs_hold_the_weights_where_params_ask_for_it(project: Project) -> None:
    weights = (project.folder / WEIGHTS).read_bytes()
    project.set("runtime.copy_outs", True)
    (project.folder / "mlflow.db").unlink()
    shutil.rmtree(project.folder / "models")
    project.sync()
    (run,) = project.runs_of("train")
    (logged,) = (run["artifacts"] / "models").iterdir()
    assert (logged.name, logged.read_bytes()) == (Path(WEIGHTS).name, weights)


@pytest.mark.slow
def test_a_clone_with_a_cache_has_the_runs_of_all_branches(project: Project, tmp_path: Path) -> None:
    project.git("checkout", "-qb", "other")
    project.set(LR, 0.5)
    project.dvc("repro")
    project.commit("another learning rate")
    project.git("checkout", "-q", "-")
    before = metrics(project)
    project.run("git", "clone", "-q", str(project.folder), str(tmp_path / "clone"))
    clone = Project(tmp_path / "clone")
    assert "not here" not in clone.sync()  # what a fresh clone lacks is told to who asks
    assert "states whose files are not here: 7" in clone.gradtrail("sync", "-v")
    shutil.copytree(project.folder / ".dvc/cache/files", clone.folder / ".dvc/cache/files")
    assert "rebuilt: fetch, train (2), evaluate (2), gradients (2)" in clone.sync()
    assert metrics(clone) == before
    commits = {run["tags"]["mlflow.source.git.commit"] for run in clone.runs() if run["params"].get(LR) == "0.5"}
    assert commits == {clone.git("rev-parse", "origin/other").strip()}
    assert not (clone.folder / "models/final.safetensors").exists(), "a sync leaves the working folder alone"


def test_commits_of_another_form_are_skipped(project: Project) -> None:
    lock = project.lock()
    for content in (b"schema: '2.0'\nstages:\n  fetch: 3\n", b"<<<<<<< HEAD\n", b"stages:\n  other: {cmd: run}\n"):
        (project.folder / "dvc.lock").write_bytes(content)
        project.commit("odd")
    (project.folder / "dvc.lock").write_bytes(lock)
    assert project.sync().endswith("4 runs present; skipped, not readable: 2\n")


@pytest.mark.slow
def test_lost_weights_of_a_commit_do_not_contradict_its_record(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of other code may give the same outs; those that are here, and were never made, contradict it."""
    monkeypatch.chdir(project.folder)
    lock, other = project.lock(), hashlib.md5(b"other weights", usedforsecurity=False).hexdigest()
    Path("dvc.lock").write_bytes(lock.replace(digest(Path(WEIGHTS)).encode(), other.encode()))
    project.commit("of other code")
    Path("dvc.lock").write_bytes(lock)
    project.commit("of this code")
    sync()
    assert "wrote these outputs" not in capsys.readouterr().err
    cached = cached_path(other)
    cached.parent.mkdir(exist_ok=True)
    cached.write_bytes(b"other weights")
    sync()
    assert f"wrote these outputs from another {WEIGHTS}" in capsys.readouterr().err


@pytest.mark.slow
def test_commit_of_code_that_did_not_run_is_dirty(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    assert dirty(project) == {"false"}
    with Path("src/gradtrail/core/second.py").open("a") as code:
        code.write("\n")
    project.commit("edited, and not run")
    assert "true" in dirty(project)


def dirty(project: Project) -> set[str]:
    """Return whether the commit that is checked out has other code or params than the states of its lock."""
    snapshot = snapshot_of(project.git("rev-parse", "HEAD").strip())
    assert snapshot is not None
    return {recorded_origin(stage)["git.dirty"] for stage in consistent_stages(snapshot)}


@pytest.mark.slow
def test_unreadable_outs_of_a_commit_are_reported_in_a_line(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.folder)
    written = Path("results/metrics/evaluate.json")
    write_json(written, {"data": read_json(written)})
    project.dvc("commit", "-f")
    project.git("commit", "-q", "--all", "--amend", "-m", "metrics that are not flat")
    Path("mlflow.db").unlink()
    assert describe(sync()) == "0 runs present; rebuilt: fetch, train, gradients; skipped, not readable: 1"
    message = capsys.readouterr().err
    assert "no run can be rebuilt (KeyError: 'dataset')" in message
