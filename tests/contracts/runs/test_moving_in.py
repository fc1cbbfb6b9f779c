"""A repository that an older version filled goes on working when code moves and deps become folders."""

from pathlib import Path

import pytest
from dvc.repo import Repo
from projects import Project
from ruamel.yaml import YAML

from gradtrail.stages.common.files import read_json, write_json
from gradtrail.stages.common.pipeline_file import is_code
from gradtrail.tracking.lineage.origin import origin_of
from gradtrail.tracking.lineage.recorded import consistent_stages
from gradtrail.tracking.lineage.snapshots import snapshot_of, working_snapshot
from gradtrail.tracking.mlflow.stored_run import StoredRun
from gradtrail.tracking.sync.sync import sync

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # in what DVC imports
]


@pytest.fixture(autouse=True)
def working_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def move_code(project: Project) -> None:
    """Move the code of each stage to a folder of its own, and make that the stage's dep."""
    yaml = YAML()
    pipeline = yaml.load(Path("dvc.yaml"))
    for name, stage in pipeline["stages"].items():
        package = Path("src/gradtrail/stages/of_before") / name
        package.mkdir(parents=True)
        script = Path(f"pipeline/{name}.py")
        (package / "main.py").write_text(script.read_text().split('if __name__ == "__main__":')[0])
        script.write_text(
            "from gradtrail.stages.common.stage import run_stage\n"
            f"from gradtrail.stages.of_before.{name}.main import main\n\n"
            f'if __name__ == "__main__":\n    run_stage(main, {name!r})\n'
        )
        code = [dep for dep in stage["deps"] if is_code(dep)]
        stage["deps"] = [dep for dep in stage["deps"] if dep not in code] + [str(script), str(package)]
    yaml.dump(pipeline, Path("dvc.yaml"))


def states() -> set[str]:
    working = working_snapshot()
    assert working is not None
    return {stage.state for stage in consistent_stages(working)}


def test_code_that_moved_makes_no_second_run_and_no_stage_run_again(project: Project) -> None:
    runs = project.runs()
    before = states()
    assert {run["tags"]["state"] for run in runs} == before
    move_code(project)
    assert states() == before, "keys of a lock are computed from the deps that the lock has"
    assert (sync().present, sync().rebuilt) == (4, {})

    with Repo(str(project.folder)) as dvc:
        dvc.commit(force=True)
    assert states().isdisjoint(before)
    assert (sync().present, sync().rebuilt) == (4, {})
    project.commit("moved")
    assert (sync().present, sync().rebuilt) == (4, {})
    assert [run["id"] for run in project.runs()] == [run["id"] for run in runs]
    with Repo(str(project.folder)) as dvc:
        assert dvc.reproduce() == []

    Path("mlflow.db").unlink()
    said = project.sync()  # in a process of its own, as MLflow keeps the lost database open in this one
    assert said.endswith("0 runs present; rebuilt: fetch, train, evaluate, gradients\n"), (
        "one run for two states of the same outs"
    )


def test_a_commit_is_compared_by_the_files_of_its_folders(project: Project) -> None:
    move_code(project)
    with Repo(str(project.folder)) as dvc:
        dvc.commit(force=True)
    project.commit("moved")
    assert dirty(project) == {"false"}
    source = Path("src/gradtrail/stages/of_before/fetch/main.py")
    source.write_text(source.read_text() + "\n")
    project.commit("edited, and not run")
    assert dirty(project) == {"true"}


def test_outs_of_another_form_are_passed_over_in_a_line(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    written = Path("metrics/evaluate.json")
    write_json(written, {"data": read_json(written)})
    with Repo(str(project.folder)) as dvc:
        dvc.commit(force=True)
    project.git("commit", "-q", "--all", "--amend", "-m", "of another form")
    Path("mlflow.db").unlink()
    report = sync()
    assert (report.rebuilt, report.unreadable) == ({"fetch": 1, "train": 1, "gradients": 1}, 1)
    said = capsys.readouterr().err
    assert "no run can be rebuilt (metrics/evaluate.json: data should be a number or text, got {" in said


@pytest.mark.usefixtures("project")
def test_a_bug_while_a_run_is_rebuilt_is_no_unreadable_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    Path("mlflow.db").unlink()
    monkeypatch.setattr(StoredRun, "log_outs", broken)
    with pytest.raises(KeyError, match="a bug"):
        sync()


def dirty(project: Project) -> set[str]:
    """Return whether the commit that is checked out has other code or params than the states of its lock."""
    snapshot = snapshot_of(project.git("rev-parse", "HEAD").strip())
    assert snapshot is not None
    return {origin_of(stage)["git.dirty"] for stage in consistent_stages(snapshot)}
