"""A state has one run in MLflow, with the digests of its files, whatever happened to code, outs and store before."""

import pytest
from mlflow import MlflowClient
from projects import Project

from gradtrail.stages.common.files import digest
from gradtrail.tracking import state
from gradtrail.tracking.dvc_history import consistent_stages, recorded_states
from gradtrail.tracking.sync import describe, sync

WEIGHTS = "models/final.safetensors"


def written(project: Project) -> list[str]:
    """Return the weights that the training's runs name, the newest first."""
    return [run["outs"][WEIGHTS] for run in project.runs_of("train")]


def train_elsewhere(project: Project) -> str:
    """Train the same state to other bytes; return what was printed."""
    return project.run("sh", "pipeline/stage.sh", "train", env={"OTHER_BYTES": "!"})


@pytest.mark.usefixtures("client")
def test_what_a_lock_records_is_known_without_reading_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync asks it of every commit."""
    monkeypatch.setattr(state, "digest", None)
    recorded = recorded_states().snapshots[-1]
    assert [stage.name for stage in consistent_stages(recorded) if stage.state] == [
        *("fetch", "train", "evaluate", "gradients")
    ]


@pytest.mark.slow
def test_a_partial_checkout_trains_on(project: Project) -> None:
    """What made the data is not there, and what it read neither; the stage's own deps are."""
    (project.folder / "data/words.txt").unlink()
    project.set("evaluate.calibration_bins", 7)
    assert project.ran(project.dvc("repro", "--allow-missing", "evaluate")) == ["evaluate"]
    newest = project.runs_of("evaluate")[0]
    assert newest["tags"]["mlflow.parentRunId"] == project.runs_of("train")[0]["id"]
    assert newest["params"]["fetch.dataset"] == "digits"


def test_a_run_never_mixes_two_results_and_sync_deletes_none_that_was_executed(
    project: Project, client: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    (first,) = project.runs_of("train")
    train_elsewhere(project)
    (second,) = project.runs_of("train")
    assert second["id"] != first["id"]
    assert second["outs"][WEIGHTS] == digest(project.folder / WEIGHTS)
    assert client.get_run(first["id"]).data.tags["replaced_by"] == second["id"]

    assert describe(sync()) == "4 runs present; rebuilt: train"
    warnings = capsys.readouterr().err
    assert "a new run replaces its run" in warnings
    assert "records other outputs than its execution here wrote; both have a run" in warnings
    recorded, executed = project.runs_of("train")
    assert executed["id"] == second["id"]
    assert recorded["outs"][WEIGHTS] == first["outs"][WEIGHTS]
    below = [run for run in project.runs() if "train_state" in run["tags"]]
    assert {run["tags"]["mlflow.parentRunId"] for run in below} == {recorded["id"]}
    assert describe(sync()) == "5 runs present"


def test_two_kinds_of_machine_have_a_run_each_and_neither_removes_the_others(
    project: Project, client: MlflowClient
) -> None:
    (first,) = project.runs_of("train")
    client.set_tag(first["id"], "bytes", "of-another-kind")
    assert "a new run replaces its run" not in train_elsewhere(project)
    assert len(set(written(project))) == 2
    sync()
    assert len(set(written(project))) == 2, "the lock names the first, another machine might read the second"
    project.dvc("commit", "-f")
    sync()
    assert len(set(written(project))) == 2, "a commit has the first, the working folder the second"
    assert "rebuilt" not in describe(sync())


@pytest.mark.slow
def test_a_rebuilt_run_of_other_bytes_stays_when_the_state_runs_again(project: Project, client: MlflowClient) -> None:
    """What was pulled from another kind of machine has a run that does not say so; it is not taken over."""
    (first,) = project.runs_of("train")
    client.delete_tag(first["id"], "bytes")
    client.set_tag(first["id"], "rebuilt", "true")
    train_elsewhere(project)
    assert len(set(written(project))) == 2
    train_elsewhere(project)
    assert len(written(project)) == 2, "the second time this machine's own run goes on"
    assert project.runs_of("train")[0]["tags"]["attempts"] == "2"


def test_a_lock_that_cannot_be_made_does_not_stop_a_stage(project: Project) -> None:
    locks = project.folder / ".gradtrail" / "locks"
    for path in locks.iterdir():
        path.unlink()
    locks.rmdir()
    locks.write_text("a file in the place of the folder")
    process = project.start("sh", "pipeline/stage.sh", "train")  # without waiting for a shipper, which cannot start
    message, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "warning" in message
    assert "Traceback" not in message


def test_runs_of_a_damaged_database_are_rebuilt_once_it_is_moved_away(project: Project) -> None:
    database = project.folder / "mlflow.db"
    before = {run["tags"]["state"] for run in project.runs()}
    database.write_bytes(b"no database " * 1000)
    message = project.gradtrail("sync", status=2)
    assert message.count("\n") == 1
    assert message.startswith("gradtrail: mlflow.db is damaged; move mlflow.db* away")
    for path in project.folder.glob("mlflow.db*"):
        path.unlink()
    assert "rebuilt: fetch, train, evaluate, gradients" in project.gradtrail("sync")
    assert {run["tags"]["state"] for run in project.runs()} == before
