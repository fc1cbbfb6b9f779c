"""A sync creates the runs of what is in git: of all branches, and of commits that no longer fit."""

import shutil
from pathlib import Path

import pytest
from projects import Project
from ruamel.yaml import YAML
from whole_runs import FIRST, LR, OTHER, by_state, whole_runs

from gradtrail.stages.common.files import read_json, write_json
from gradtrail.tracking.lineage.recorded import consistent_stages
from gradtrail.tracking.lineage.snapshots import snapshot_of
from gradtrail.tracking.mlflow.stored_run import StoredRun
from gradtrail.tracking.sync.origin import origin_of
from gradtrail.tracking.sync.sync import sync

slow = pytest.mark.slow


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


def test_commits_of_another_form_are_skipped(project: Project) -> None:
    lock = project.lock()
    for content in (b"schema: '2.0'\nstages:\n  fetch: 3\n", b"<<<<<<< HEAD\n", b"stages:\n  other: {cmd: run}\n"):
        (project.folder / "dvc.lock").write_bytes(content)
        project.commit("odd")
    (project.folder / "dvc.lock").write_bytes(lock)
    assert project.sync().endswith("4 runs present; skipped, not readable: 2\n")
    assert whole_runs(project) == FIRST


@slow
def test_commit_whose_code_wrote_the_same_bytes_gets_no_second_run(project: Project) -> None:
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


@slow
def test_commit_is_compared_by_the_files_of_its_code_folders(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    core, yaml = "src/gradtrail/core", YAML()
    pipeline = yaml.load(Path("dvc.yaml"))
    for stage in pipeline["stages"].values():
        stage["deps"] = [core if dep.startswith(core) else dep for dep in stage["deps"]]
    yaml.dump(pipeline, Path("dvc.yaml"))
    project.dvc("commit", "-f")
    project.commit("folders as deps")
    assert dirty(project) == {"false"}
    source = Path(core, "second.py")
    source.write_text(source.read_text() + "\n")
    project.commit("edited, and not run")
    assert dirty(project) == {"true"}


def dirty(project: Project) -> set[str]:
    """Return whether the commit that is checked out has other code or params than the states of its lock."""
    snapshot = snapshot_of(project.git("rev-parse", "HEAD").strip())
    assert snapshot is not None
    return {origin_of(stage)["git.dirty"] for stage in consistent_stages(snapshot)}


@slow
def test_unreadable_outs_of_a_commit_are_reported_in_a_line(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.folder)
    written = Path("results/metrics/evaluate.json")
    write_json(written, {"data": read_json(written)})
    project.dvc("commit", "-f")
    project.git("commit", "-q", "--all", "--amend", "-m", "metrics that are not flat")
    Path("mlflow.db").unlink()
    report = sync()
    assert (report.rebuilt, report.unreadable) == ({"fetch": 1, "train": 1, "gradients": 1}, 1)
    message = capsys.readouterr().err
    assert "no run can be rebuilt (results/metrics/evaluate.json: data should be a number or text, got {" in message


@slow
def test_bug_while_a_run_is_rebuilt_is_raised(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.chdir(project.folder)
    Path("mlflow.db").unlink()
    monkeypatch.setattr(StoredRun, "log_outs", broken)
    with pytest.raises(KeyError, match="a bug"):
        sync()
