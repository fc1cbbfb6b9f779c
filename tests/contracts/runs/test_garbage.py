"""`gradtrail gc` removes what nothing refers to, and nothing else: a sync after it has nothing to make again."""

import os
import pty
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from projects import Project, environment, stop

LR, CLIP, BINS = "train.adamw.learning_rate", "train.clip_norm", "evaluate.calibration_bins"
NOTHING = "nothing to remove. "
pytestmark = pytest.mark.slow


def own_code(project: Project) -> dict[str, str]:
    return {"PYTHONPATH": str(project.folder / "src")}


def gc(project: Project, *arguments: str, status: int = 0, **env: str) -> str:
    return project.gradtrail("gc", *arguments, env=env, status=status)


def sql(project: Project, query: str) -> list[tuple]:
    with closing(sqlite3.connect(project.folder / "mlflow.db")) as store, store:
        return store.execute(query).fetchall()


def an_hour_later(project: Project) -> None:
    sql(project, "update runs set start_time = start_time - 3600000, end_time = end_time - 3600000")


def ids(project: Project) -> set[str]:
    return {run["id"] for run in project.runs()}


def trained(project: Project, learning_rate: float) -> set[str]:
    """Run with a learning rate; return the runs of that."""
    before = ids(project)
    project.set(LR, learning_rate)
    project.dvc("repro")
    return ids(project) - before


def forget_what_ran(project: Project) -> None:
    shutil.rmtree(project.folder / ".dvc/cache/runs")


def assert_sync_has_nothing_to_do(project: Project) -> None:
    runs = ids(project)
    assert re.fullmatch(r"\d+ runs present\n", project.sync())
    assert ids(project) == runs
    assert all((run["artifacts"] / "lineage.json").is_file() for run in project.runs())
    assert gc(project).startswith(NOTHING)


def test_referenced_runs_stay_and_other_garbage_is_removed(project: Project) -> None:
    project.dvc("exp", "run", "-S", f"{LR}=0.5", "--name", "here")
    project.git("checkout", "-q", ".")
    needed = ids(project)
    assert len(needed) == 7
    lost = trained(project, 0.25)
    trained(project, 0.125)
    in_folder = ids(project) - lost
    project.sync()
    an_hour_later(project)
    assert gc(project).startswith(NOTHING), "the run-cache has all of it"
    project.dvc("gc", "--all-commits", "--all-experiments", "--workspace", "--force")
    leftovers = make_leftovers(project)
    listed = gc(project)
    assert "nothing removed: not interactive; pass --yes" in listed
    assert ids(project) == in_folder | lost
    for name in ("digits · lr 0.25", "deleted in MLflow", ".outs/train"):
        assert name in listed, listed
    assert all(path.exists() for path in leftovers)
    assert "removed: " in gc(project, "--yes")
    assert ids(project) == in_folder
    assert not any(path.exists() for path in leftovers)
    assert {path.parent.name for path in (project.folder / "mlruns").glob("*/artifacts")} == in_folder
    for table in ("metrics", "latest_metrics", "params", "tags"):
        assert {run for (run,) in sql(project, f"select run_uuid from {table}")} <= in_folder  # noqa: S608
    assert_sync_has_nothing_to_do(project)
    assert project.ran(project.dvc("repro")) == []


DELETED_RUN = """
from gradtrail.tracking.mlflow.client import experiment_id, open_store
client = open_store()
run = client.create_run(experiment_id(client, "models"), tags={"state": "0"}, run_name="unloved")
client.log_text(run.info.run_id, "x" * 5000, "note.txt")
client.delete_run(run.info.run_id)
print(run.info.run_id)
"""


def make_leftovers(project: Project) -> list[Path]:
    """Leave behind what killed processes and earlier times leave behind."""
    deleted = project.python("-c", DELETED_RUN).strip()
    paths = [
        project.folder / "mlruns" / deleted / "artifacts/note.txt",
        project.folder / ".outs/train/models/final.safetensors",
        project.folder / ".outs/train.old/results/metrics/train.json",
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


OPEN_RUNS = """
import time
from gradtrail.tracking.mlflow.tags import process_tags
from gradtrail.tracking.mlflow.client import experiment_id, open_store
client = open_store()
for tags in ({"process": "elsewhere:1"}, process_tags()):
    client.create_run(experiment_id(client, "models"), tags={"state": "0", "stage": "train"} | tags)
print("ready", flush=True)
time.sleep(600)
"""


def test_open_and_just_ended_runs_stay(project: Project) -> None:
    process = project.start(sys.executable, "-c", OPEN_RUNS, env=own_code(project))
    assert process.stdout
    try:
        assert any("ready" in line for line in process.stdout)
        ended = trained(project, 0.25)
        project.git("checkout", "-q", ".")
        project.dvc("checkout")
        forget_what_ran(project)
        runs = ids(project)
        assert gc(project, "--yes").startswith(NOTHING)
        assert ids(project) == runs
        an_hour_later(project)
        assert f"removed: {len(ended)}," in gc(project, "--yes")
        assert ids(project) == runs - ended
    finally:
        stop(process, signal.SIGKILL, when=lambda: True)
    assert "removed: 1," in gc(project, "--yes")
    assert [run["tags"]["process"] for run in project.runs() if run["status"] == "RUNNING"] == ["elsewhere:1"]


def test_stopped_training_stays_while_it_can_resume(project: Project) -> None:
    project.set(LR, 0.5)
    with project.holding("train") as has_begun:
        stop(project.start(sys.executable, "-m", "dvc", "repro"), signal.SIGKILL, when=has_begun)
    ((state, run_id),) = ((run["tags"]["state"], run["id"]) for run in project.runs() if run["status"] == "RUNNING")
    project.git("checkout", "-q", ".")
    project.dvc("checkout", "--force")
    checkpoint = project.folder / ".gradtrail/resume" / f"{state[:32]}-cpu1" / "step_000000001"
    checkpoint.mkdir(parents=True)
    (done,) = (run["tags"]["state"] for run in project.runs_of("train") if run["id"] != run_id)
    complete = project.folder / ".gradtrail/resume" / f"{done[:32]}-cpu1"
    complete.mkdir()
    message = gc(project, "--yes")
    assert "its training is complete" in message
    assert not complete.exists()
    assert run_id in ids(project)
    assert checkpoint.exists()
    long_ago = time.time() - 31 * 86_400
    for path in (checkpoint, checkpoint.parent):
        os.utime(path, (long_ago, long_ago))
    message = gc(project, "--yes")
    assert "killed; its state is not recorded" in message
    assert "stopped 31 days ago" in message
    assert run_id not in ids(project)
    assert not checkpoint.parent.exists()
    assert_sync_has_nothing_to_do(project)


def test_parent_of_a_needed_run_stays(project: Project) -> None:
    """Two trainings of the same bytes have one evaluation, whose parent is the first one."""
    (first,) = project.runs_of("train")
    project.set(CLIP, 5.0)  # which the small stage does not look at
    project.dvc("repro")
    project.git("add", "-A")
    project.git("commit", "-q", "--amend", "-m", "results")
    project.sync()
    forget_what_ran(project)
    an_hour_later(project)
    gc(project, "--yes")
    assert first["id"] in ids(project)
    assert_sync_has_nothing_to_do(project)


INTERRUPTED = """
from gradtrail.tracking.gc import gc
def broken(client):
    raise KeyboardInterrupt
gc.purge = broken
gc.collect_garbage(yes=True)
"""


def test_next_gc_completes_an_interrupted_one(project: Project) -> None:
    needed = ids(project)
    assert len(trained(project, 0.25)) == 3
    project.git("checkout", "-q", ".")
    project.dvc("checkout")
    forget_what_ran(project)
    an_hour_later(project)
    assert "KeyboardInterrupt" in project.python("-c", INTERRUPTED, status=130)
    assert len(sql(project, "select 1 from runs where lifecycle_stage = 'deleted'")) == 3
    assert ids(project) == needed
    assert "deleted in MLflow" in gc(project, "--yes")
    assert ids(project) == needed
    assert sql(project, "select count(*) from runs") == [(4,)]
    assert_sync_has_nothing_to_do(project)


def on_a_terminal(project: Project, command: Sequence[str], answer: bytes) -> str:
    """Run a command on a terminal, and type an answer."""
    ours, theirs = pty.openpty()
    env = environment() | own_code(project)
    process = subprocess.Popen(command, cwd=project.folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    message = b""
    try:
        while b"[y/N]" not in message:
            message += os.read(ours, 1024)
        os.write(ours, answer)
        while True:
            message += os.read(ours, 1024)
    except OSError:  # the other end is closed
        os.close(ours)
    assert process.wait() == 0
    return message.decode()


@pytest.mark.parametrize("store", ["none", "its run"])
def test_a_lock_without_its_files_makes_no_training_complete(project: Project, store: str) -> None:
    """As in a fresh clone, where the training that the lock names was stopped before its first end."""
    (train,) = project.runs_of("train")
    checkpoint = project.folder / ".gradtrail/resume" / f"{train['tags']['state'][:32]}-cpu1" / "step_000000001"
    checkpoint.mkdir(parents=True)
    shutil.rmtree(project.folder / ".dvc/cache/files")
    shutil.rmtree(project.folder / "models")
    if store == "none":
        (project.folder / "mlflow.db").unlink()
    else:
        sql(project, f"update runs set status = 'KILLED' where run_uuid = '{train['id']}'")  # noqa: S608
    gc(project, "--yes")
    assert checkpoint.exists()
    assert store == "none" or train["id"] in ids(project)


def test_gc_asks_on_a_terminal(project: Project) -> None:
    (leftover := project.folder / ".outs/train").mkdir()
    command = (sys.executable, "-m", "gradtrail", "gc")
    for answer in (b"\n", b"n\n", b"\x04"):  # the last: Ctrl-D
        assert "removed:" not in on_a_terminal(project, command, answer)
        assert leftover.exists()
    assert "removed: 1, 0 bytes" in on_a_terminal(project, command, b"y\n")
    assert not leftover.exists()


def test_runs_of_a_server_are_left_alone(project: Project) -> None:
    (leftover := project.folder / ".outs/train").mkdir()
    checkpoint = project.folder / ".gradtrail/resume" / f"{'0' * 32}-cpu1"
    checkpoint.mkdir(parents=True)
    forget_what_ran(project)
    trained(project, 0.25)
    project.git("checkout", "-q", ".")
    an_hour_later(project)
    runs = ids(project)
    message = gc(project, "--yes", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert message.startswith("runs are kept: other clones may use this store")
    assert not leftover.exists()
    assert checkpoint.exists(), "nobody here knows whether it is complete"
    assert ids(project) == runs


def test_gc_refuses_if_records_cannot_be_read(project: Project, tmp_path: Path) -> None:
    trained(project, 0.25)
    project.git("checkout", "-q", ".")
    an_hour_later(project)
    runs = ids(project)
    (broken := project.folder / ".git/refs/heads/broken").write_text("1" * 40 + "\n")
    assert "git cannot read all commits" in gc(project, "--yes", status=2)
    broken.unlink()
    assert "not a git repository" in gc(project, "--yes", status=2, GIT_DIR=str(tmp_path / "no"))
    (project.folder / ".dvc/cache").rename(project.folder / ".dvc/away")
    assert "DVC's cache is missing" in gc(project, "--yes", status=2)
    (project.folder / "dvc.yaml").rename(project.folder / "away.yaml")
    assert "not inside a gradtrail repository" in gc(project, "--yes", status=2)
    assert ids(project) == runs
