"""`gradtrail gc` removes what nothing refers to, and nothing else: a sync after it has nothing to make again."""

import os
import pty
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from filelock import FileLock
from projects import Project, environment

LR = "train.adamw.learning_rate"
NOTHING = "nothing to remove. "
pytestmark = pytest.mark.slow


def gc(project: Project, *arguments: str, status: int = 0, **env: str) -> str:
    return project.gradtrail("gc", *arguments, env=env, status=status)


def sql(project: Project, query: str) -> list[tuple]:
    with closing(sqlite3.connect(project.folder / "mlflow.db")) as store, store:
        return store.execute(query).fetchall()


def pass_days(project: Project, days: int) -> None:
    for column in ("start_time", "end_time", "deleted_time"):
        sql(project, f"update runs set {column} = {column} - {days * 86_400_000}")  # noqa: S608


def ids(project: Project) -> set[str]:
    return {run["id"] for run in project.runs()}


def discard_training(project: Project, learning_rate: float) -> set[str]:
    """Run with a learning rate, and let nothing record that; return the runs."""
    before = ids(project)
    project.set(LR, learning_rate)
    project.dvc("repro")
    project.git("checkout", "-q", ".")
    project.dvc("checkout")
    shutil.rmtree(project.folder / ".dvc/cache/runs")
    return ids(project) - before


def make_folder(project: Project, name: str, *, days: int) -> Path:
    """Leave a folder behind as a killed stage does."""
    file = project.folder / name / "file"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("12345")
    for path in (file, file.parent):
        os.utime(path, (time.time() - days * 86_400,) * 2)
    return file.parent


@pytest.mark.nightly
def test_what_is_not_recorded_is_removed_after_30_days(project: Project) -> None:
    project.dvc("exp", "run", "-S", f"{LR}=0.5", "--name", "here")
    project.git("checkout", "-q", ".")
    needed = ids(project)
    discarded = discard_training(project, 0.25)
    pass_days(project, 29)
    assert gc(project, "--yes").startswith(NOTHING)
    pass_days(project, 2)
    young = discard_training(project, 0.125)
    listed = gc(project)
    assert "nothing removed: not interactive; pass --yes" in listed
    assert "adamw.learning_rate=0.25" in listed
    assert ids(project) == needed | discarded | young
    project.delete_run(min(discarded))
    assert f"removed: {len(discarded) - 1}\n" in gc(project, "--yes")
    assert ids(project) == needed | young
    pass_days(project, 29)
    assert gc(project, "--yes").startswith(NOTHING)
    pass_days(project, 2)
    assert f"removed: {len(young) + 1}\n" in gc(project, "--yes"), "with what was deleted 31 days ago"
    young = set()
    assert {path.parent.name for path in (project.folder / "mlruns").glob("*/artifacts")} == needed | young
    for table in ("runs", "metrics", "latest_metrics", "params", "tags"):
        assert {run for (run,) in sql(project, f"select run_uuid from {table}")} <= needed | young  # noqa: S608
    assert re.fullmatch(r"\d+ runs present\n", project.sync())
    assert gc(project).startswith(NOTHING)
    assert project.ran(project.dvc("repro")) == []


def test_parent_of_a_needed_run_stays(project: Project) -> None:
    """Two trainings of the same bytes have one evaluation, whose parent is the first one."""
    (first,) = project.runs_of("train")
    project.set("train.clip_norm", 5.0)  # which the small stage does not look at
    project.dvc("repro")
    project.git("add", "-A")
    project.git("commit", "-q", "--amend", "-m", "results")
    project.sync()
    shutil.rmtree(project.folder / ".dvc/cache/runs")
    pass_days(project, 31)
    gc(project, "--yes")
    assert first["id"] in ids(project)


def answer_on_a_terminal(project: Project, answer: bytes, before: Callable[[], None] = lambda: None) -> str:
    """Run the command on a terminal, and type an answer, after something happened."""
    terminal, other_end = pty.openpty()
    env = environment() | {"PYTHONPATH": str(project.folder / "src")}
    command = (sys.executable, "-m", "gradtrail", "gc")
    process = subprocess.Popen(
        command, cwd=project.folder, env=env, stdin=other_end, stdout=other_end, stderr=other_end
    )
    os.close(other_end)
    message = b""
    try:
        while b"[y/N]" not in message:
            message += os.read(terminal, 1024)
        before()
        os.write(terminal, answer)
        while True:
            message += os.read(terminal, 1024)
    except OSError:  # the other end is closed
        os.close(terminal)
    assert process.wait() == 0
    return message.decode()


def test_folders_of_killed_stages_are_removed_after_30_days_and_a_question(project: Project) -> None:
    names = (".gradtrail/resume/0123-cpu1", ".gradtrail/records/0123/1", ".outs/train")
    old = [make_folder(project, name, days=31) for name in names]
    os.utime(old[1].parent, (1, 1))
    young = make_folder(project, ".gradtrail/resume/4567-cpu1", days=29)
    for answer in (b"\n", b"\x04"):  # the last: Ctrl-D
        assert "removed:" not in answer_on_a_terminal(project, answer)
    used, locked = (make_folder(project, f".gradtrail/resume/{digit * 32}-cpu1", days=31) for digit in "89")
    lock = FileLock(project.folder / f".gradtrail/locks/train-{'9' * 32}.lock")

    def use() -> None:
        (used / "file").touch()
        lock.acquire()

    assert "removed: 3\r" in answer_on_a_terminal(project, b"y\n", use)
    assert not any(folder.exists() for folder in old)
    assert all(folder.exists() for folder in (young, used, locked))


def test_run_that_is_needed_by_the_time_of_the_answer_stays(project: Project) -> None:
    rate = 0.25
    discarded = discard_training(project, rate)
    pass_days(project, 31)

    def record() -> None:
        project.set(LR, rate)
        project.set("runtime.tracking", False)
        project.dvc("repro")

    assert "removed: 0\r" in answer_on_a_terminal(project, b"y\n", record)
    assert discarded <= ids(project)


def test_runs_that_other_clones_made_or_use_stay(project: Project, tmp_path: Path) -> None:
    project.git("clone", "-q", str(project.folder), str(tmp_path / "clone"))
    clone, shared = Project(tmp_path / "clone"), {"MLFLOW_TRACKING_URI": f"sqlite:///{project.folder}/mlflow.db"}
    shutil.copytree(project.folder / ".dvc/cache", clone.folder / ".dvc/cache")
    clone.set(LR, 0.5)
    clone.dvc("repro", env=shared)
    used = discard_training(project, 0.25)
    clone.set(LR, 0.25)
    clone.dvc("repro")
    clone.gradtrail("sync", env=shared)
    own = discard_training(project, 0.125)
    pass_days(project, 31)
    before = ids(project)
    assert f"removed: {len(own)}\n" in gc(project, "--yes")
    assert ids(project) == before - own
    assert len(used) == 3
    pass_days(project, 31)
    assert gc(clone, "--yes", **shared).startswith("runs and their records are kept: other clones may use this store")


def test_runs_of_a_server_are_left_alone(project: Project) -> None:
    leftover = make_folder(project, ".outs/train", days=31)
    records = [make_folder(project, f".gradtrail/{name}/0123/1", days=31) for name in ("journal", "records")]
    for record in records:
        os.utime(record.parent, (1, 1))
    discard_training(project, 0.25)
    pass_days(project, 31)
    runs = ids(project)
    message = gc(project, "--yes", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert message.startswith("runs and their records are kept: other clones may use this store")
    assert not leftover.exists()
    assert all(record.exists() for record in records), "they may have what the server lacks"
    assert ids(project) == runs


def test_gc_refuses_if_records_cannot_be_read_and_leaves_what_others_deleted(project: Project) -> None:
    discarded = discard_training(project, 0.25)
    pass_days(project, 31)
    runs = ids(project)
    (broken := project.folder / ".git/refs/heads/broken").write_text("1" * 40 + "\n")
    assert "git" in gc(project, "--yes", status=2)
    assert ids(project) == runs
    broken.unlink()
    sql(project, "update experiments set lifecycle_stage = 'deleted' where name = 'Default'")
    assert f"removed: {len(discarded)}\n" in gc(project, "--yes")
    assert ids(project) == runs - discarded
    assert ("Default",) in sql(project, "select name from experiments")
