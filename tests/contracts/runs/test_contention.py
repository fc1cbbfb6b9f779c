"""Many that write to one database at once: nothing is lost, told by count and by digest."""

import pytest
from projects import Project
from ruamel.yaml import YAML

LR = "train.adamw.learning_rate"
RATES = [f"0.{number}" for number in range(11, 31)]  # each of which writes other bytes


@pytest.mark.nightly
def test_twenty_experiments_by_four_workers_leave_all_their_runs(project: Project) -> None:
    project.dvc("exp", "run", "--queue", "-S", f"{LR}={','.join(RATES)}")
    project.start_queue(4)
    status = project.wait_for_queue(seconds=1200)
    assert status.count("Success") == len(RATES), status
    logs = [path.read_text(errors="replace") for path in (project.folder / ".dvc/tmp/exps/run").rglob("*.out")]
    assert len(logs) == len(RATES)
    assert not [log for log in logs if "warning: MLflow" in log]

    runs = project.runs()
    assert {run["status"] for run in runs} == {"FINISHED"}
    assert len({run["tags"]["state"] for run in runs}) == len(runs) == 1 + 3 * (1 + len(RATES))
    for name, commit in experiments(project).items():
        lock = YAML(typ="safe").load(project.git("show", f"{commit}:dvc.lock"))["stages"]
        (train,) = (run for run in project.runs_of("train") if run["tags"].get("dvc.exp_name") == name)
        assert train["params"][LR] == str(lock["train"]["params"]["params.yaml"]["train"]["adamw"]["learning_rate"])
        below = {run["tags"]["stage"]: run for run in runs if run["tags"].get("train_state") == train["tags"]["state"]}
        for run in (train, below["evaluate"], below["gradients"]):
            assert run["outs"] == {out["path"]: out["md5"] for out in lock[run["tags"]["stage"]]["outs"]}
            assert (run["artifacts"] / "lineage.json").is_file()
        for run in below.values():
            assert run["tags"]["mlflow.parentRunId"] == train["id"]
        assert train["metrics"]["train/length"] == len(train["params"][LR])
        assert train["metrics"]["eval/loss"] == below["evaluate"]["metrics"]["eval/loss"]
        median = "gradients/grad_norm_median"
        assert train["metrics"][median] == below["gradients"]["metrics"][median]
    assert project.sync() == f"{len(runs)} runs present\n"


def experiments(project: Project) -> dict[str, str]:
    """Return the name and the commit of each experiment."""
    lines = project.git("for-each-ref", "--format=%(refname) %(objectname)", "refs/exps").splitlines()
    pairs = (line.split(" ") for line in lines)
    commits = {ref.split("/")[-1]: commit for ref, commit in pairs if ref.count("/") == 4}
    assert len(commits) == len(RATES)
    return commits
