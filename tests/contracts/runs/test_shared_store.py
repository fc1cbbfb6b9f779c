"""What people and other clones did to a store stays: deleted runs, registered runs, runs of several clones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from projects import Project

from gradtrail.stages.common.files import read_json
from gradtrail.support.errors import UserError
from gradtrail.tracking.store import experiment_id
from gradtrail.tracking.sync import describe, restore, sync
from gradtrail.tracking.tags import CLONE, SHARED, clone_id

LR = "train.adamw.learning_rate"
KEPT = "kept deleted: 1"


@pytest.fixture
def clone(project: Project, client: MlflowClient, tmp_path: Path) -> Project:
    """A clone with the cache of the project."""
    project.git("clone", "-q", str(project.folder), str(tmp_path / "clone"))
    shutil.copytree(project.folder / ".dvc/cache", tmp_path / "clone/.dvc/cache")
    return Project(tmp_path / "clone")


@pytest.fixture
def sync_clone(clone: Project, project: Project, client: MlflowClient) -> Callable[[], str]:
    """Sync in the clone, with the store of the project."""

    def sync_there() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(clone.folder)
            patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project.folder}/mlflow.db")
            return describe(sync())

    return sync_there


def only(project: Project, stage: str) -> dict[str, Any]:
    (run,) = project.runs_of(stage)
    return run


def run_stage(project: Project, stage: str) -> None:
    project.run("sh", "pipeline/stage.sh", stage)


def test_a_run_that_a_person_deletes_stays_deleted_until_it_is_restored(project: Project, client: MlflowClient) -> None:
    run = only(project, "train")

    def check_restored() -> None:
        restored = only(project, "train")
        assert [restored[key] for key in ("id", "metrics", "outs")] == [run[key] for key in ("id", "metrics", "outs")]

    client.delete_run(run["id"])
    assert describe(sync()) == describe(sync()) == f"3 runs present; {KEPT}"
    with pytest.raises(UserError) as caught:
        restore("this")
    assert str(caught.value).endswith(f" the deleted runs: {run['id'][:8]} ({run['name']})")
    assert describe(restore(run["name"])) == "4 runs present"
    check_restored()
    with pytest.raises(UserError, match=r"^--restore this: not the name or id of any of the deleted runs: none$"):
        restore("this")

    client.delete_run(run["id"])
    sync()
    project.empty_store()
    assert project.sync() == f"0 runs present; rebuilt: fetch, evaluate, gradients; {KEPT}\n"
    assert project.sync() == f"3 runs present; {KEPT}\n"
    assert project.gradtrail("sync", "--restore", run["id"][:4]) == "3 runs present; rebuilt: train\n"
    assert only(project, "train")["outs"] == run["outs"]
    assert project.sync() == "4 runs present\n"


def test_a_deletion_counts_in_every_clone_until_the_state_is_executed(
    project: Project, client: MlflowClient, sync_clone: Callable[[], str]
) -> None:
    run = only(project, "train")
    client.delete_run(run["id"])
    assert sync_clone() == f"3 runs present; {KEPT}"
    assert KEPT in describe(sync())
    run_stage(project, "train")
    assert only(project, "train")["id"] != run["id"]
    assert describe(sync()) == sync_clone() == "4 runs present"
    project.empty_store()
    assert project.sync() == "0 runs present; rebuilt: fetch, train, evaluate, gradients\n"


@pytest.mark.slow
def test_a_deleted_run_of_several_states_of_code_stays_deleted(project: Project, client: MlflowClient) -> None:
    with (project.folder / "pipeline/gradients.py").open("a") as code:
        code.write("# a comment\n")
    project.set("runtime.tracking", False)
    project.dvc("repro")
    assert describe(sync()) == "4 runs present"
    client.delete_run(only(project, "gradients")["id"])
    assert describe(sync()) == "3 runs present; kept deleted: 2"
    project.set("runtime.tracking", True)
    run_stage(project, "gradients")
    assert describe(sync()) == "4 runs present", "of the edited code, whose results are those of the first"
    project.empty_store()
    assert project.sync() == "0 runs present; rebuilt: fetch, train, evaluate, gradients\n"


def test_what_a_deleted_run_shows_of_its_outputs_still_counts(
    project: Project, client: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.delete_run(only(project, "train")["id"])
    project.dvc("freeze", "train")
    project.set(LR, 0.7)
    project.dvc("repro", "--force", "--single-item", "train")
    message = describe(sync())
    assert f"wrote these outputs with {LR} 0.005, not 0.7; it has no run" in capsys.readouterr().err
    assert message.endswith("so without a run: 1; kept deleted: 1")
    assert project.runs_of("train") == []


def twin(client: MlflowClient, run: dict[str, Any], **tags: str) -> str:
    """Log a second run of a result, or one of its state with other tags; return its id."""
    new = client.create_run(experiment_id(client, "models"), tags=run["tags"] | tags)
    client.set_terminated(new.info.run_id, "FINISHED" if json.loads(tags.get(OUTS, "1")) else "KILLED")
    return str(new.info.run_id)


OUTS = "mlflow.gradtrail.outs"


def register(client: MlflowClient, run_id: str) -> None:
    client.create_registered_model(run_id)
    client.create_model_version(run_id, f"runs:/{run_id}/model", run_id=run_id)


def test_a_registered_run_is_the_one_that_stays(project: Project, client: MlflowClient) -> None:
    first = only(project, "train")
    second = twin(client, first, rebuilt="true")
    register(client, second)
    assert "replaced by other runs: 1" in describe(sync())
    assert only(project, "train")["id"] == second
    third = twin(client, first)
    register(client, third)
    assert "replaced" not in describe(sync())
    assert {run["id"] for run in project.runs_of("train")} == {second, third}


def test_closed_runs_without_outputs_give_way_to_an_execution(project: Project, client: MlflowClient) -> None:
    first = only(project, "train")
    for bytes_key in (first["tags"]["bytes"], "of another machine"):
        twin(client, first, bytes=bytes_key, **{OUTS: "{}"})
    assert "replaced by other runs: 1" in describe(sync())
    others = [run["tags"]["bytes"] for run in project.runs_of("train") if run["id"] != first["id"]]
    assert others == ["of another machine"]


def test_an_empty_run_stands_for_no_recorded_state(project: Project, client: MlflowClient) -> None:
    """As a sync leaves it that has lost what a killed stage wrote."""
    run = only(project, "train")
    client.set_tag(run["id"], OUTS, "{}")
    assert describe(sync()) == "3 runs present; rebuilt: train"
    assert only(project, "train")["outs"] == run["outs"]


def test_a_result_that_differs_in_metrics_alone_has_a_run_of_its_own(project: Project, client: MlflowClient) -> None:
    script = project.folder / "pipeline/gradients.py"
    script.write_text(script.read_text().replace('"length": len(str(value))', '"length": 99'))
    project.set("runtime.tracking", False)
    project.dvc("repro")
    assert read_json(project.folder / "results/metrics/gradients.json")["length"] == 99
    assert describe(sync()) == "4 runs present; rebuilt: gradients"
    newest, _ = project.runs_of("gradients")
    assert newest["metrics"]["gradients/length"] == 99


def test_runs_that_another_clone_uses_are_marked_as_shared(
    project: Project, client: MlflowClient, sync_clone: Callable[[], str]
) -> None:
    assert {run["tags"][CLONE] for run in project.runs()} == {clone_of(project)}
    project.set(LR, 0.5)
    project.dvc("repro")
    assert sync_clone() == "7 runs present"
    assert {run["tags"][CLONE] for run in project.runs() if run["params"].get(LR) != "0.5"} == {SHARED}
    assert {run["tags"][CLONE] for run in project.runs() if run["params"].get(LR) == "0.5"} == {clone_id()}


def clone_of(project: Project) -> str:
    return (project.folder / ".gradtrail/clone").read_text().split()[0]
