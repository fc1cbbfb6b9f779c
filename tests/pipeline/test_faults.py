"""What goes wrong around a stage: one line, an exit status that says so, and everything of before stands."""

import contextlib
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from projects import ROOT, STAGES, Project, besides_progress, finished_project, stop

from gradtrail.stages.common.pipeline_file import read_pipeline

pytestmark = pytest.mark.slow
OUTS = {name: spec.outs for name, spec in read_pipeline(ROOT / "dvc.yaml").items()}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A copy of a project in which every stage has run."""
    return finished_project().copy(tmp_path / "project")


def all_outs(project: Project) -> dict[str, str]:
    return project.digests(*(out for outs in OUTS.values() for out in outs))


def refusal(project: Project, stage: str, *under: str) -> str:
    """Run a stage that fails; return the one line that it ends with."""
    before = all_outs(project)
    process = project.start_stage(stage, *under)
    output, _ = process.communicate(timeout=120)
    text = besides_progress(output.splitlines())
    lines = [line for line in text if "warning: " not in line and not line.startswith("moved or copied from ")]
    assert process.returncode == 2, output
    assert len(lines) == 1, output
    assert lines[0].startswith(f"{stage}: ")
    assert all_outs(project) == before
    return lines[0]


def statuses(project: Project, stage: str) -> list[str]:
    return [run["status"] for run in project.runs_of(stage)]


def test_stopped_stage_starts_over(project: Project) -> None:
    stage, expected = "evaluate", all_outs(project)
    shutil.rmtree(project.folder / "results" / stage)  # as DVC does before it runs a stage
    with project.holding(stage) as has_begun:
        process = project.start_stage(stage)
        output, seconds = stop(process, signal.SIGHUP, when=has_begun)
    assert process.returncode == 128 + signal.SIGHUP, output
    assert output.splitlines()[-1].startswith(f"{stage}: stopped; ")
    assert "Traceback" not in output
    assert seconds < 60, "it would have waited for 600"
    assert statuses(project, stage) == ["FINISHED"], "by the first attempt"
    assert all_outs(project) == expected
    project.run_stage(stage)
    assert all_outs(project) == expected
    assert statuses(project, stage) == ["FINISHED"]


def test_a_training_whose_params_were_edited_resumes_when_the_edit_is_undone(project: Project) -> None:
    expected = all_outs(project)
    key = "train.adamw.learning_rate"
    rate = project.get(key)
    with project.holding("train") as has_begun:
        process = project.start_dvc("repro", "--force", "--single-item", "train")
        while not has_begun():
            assert process.poll() is None, process.communicate()[0]
        project.set(key, 0.123)
        (project.folder / ".git" / "hold").unlink()
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 255, output
    assert f"train: params.yaml: {key} changed from {rate} to 0.123 while train ran" in output
    assert all_outs(project) == expected
    project.set(key, rate)
    output = project.dvc("repro", "--force", "--single-item", "train")
    assert "trained before, from a checkpoint" in output
    assert all_outs(project) == expected


def after(command: str) -> tuple[str, ...]:
    """Return how to run something in a shell's process, after one of the shell's own commands."""
    return "sh", "-c", f'{command}; exec "$@"', "sh"


def files_of_at_most(kib: int) -> tuple[str, ...]:
    """Let no file grow beyond a size: to whoever writes, a full disk."""
    return after(f"ulimit -f {2 * kib}")


def test_a_full_disk_is_one_line(project: Project) -> None:
    project.set("runtime.tracking", False)
    line = refusal(project, "train", *files_of_at_most(2))
    assert "File too large" in line
    assert line.endswith("; no results were written")


def test_a_full_disk_under_the_store_costs_a_warning(project: Project) -> None:
    (project.folder / "mlflow.db").unlink()
    (lock,) = project.folder.glob(".gradtrail/locks/shipper-*.lock")
    FileLock(lock).acquire(timeout=60).lock.release()  # of a shipper without the limit, which ends now
    expected = all_outs(project)
    process = project.start_stage("evaluate", *files_of_at_most(300))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert all_outs(project) == expected
    deadline = time.monotonic() + 120
    while not list(project.folder.glob(".gradtrail/records/*/*/fault")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with FileLock(lock):  # else a shipper without the limit may ship the record before anybody tells of it
        output += project.run_stage("evaluate")  # the stage itself tells, if the shipper failed while it worked
    warnings = [line for line in output.splitlines() if line.startswith("warning: MLflow's store failed (")]
    assert [line.rpartition("; ")[2] for line in warnings] == ["`gradtrail sync` completes this run later"], output


# Permissions count for root too, once it cannot override them.
AS_ANYBODY = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.getuid() == 0 else ()


@pytest.fixture
def read_only(project: Project) -> Iterator[Project]:
    folders = [path for path in [project.folder, *project.folder.rglob("*")] if path.is_dir() and not path.is_symlink()]
    for folder in folders:
        folder.chmod(0o555)
    yield project
    for folder in folders:
        folder.chmod(0o755)


def test_a_read_only_folder_is_one_line(read_only: Project) -> None:
    line = refusal(read_only, "train", *AS_ANYBODY)
    assert "Permission denied" in line


def points(project: Project) -> list[tuple[str, str, int]]:
    """Return run, name and step of every point of every curve."""
    with contextlib.closing(sqlite3.connect(project.folder / "mlflow.db")) as store:
        return store.execute("select run_uuid, key, step from metrics").fetchall()


def test_two_processes_of_one_state_have_one_result(project: Project) -> None:
    expected, runs = all_outs(project), len(project.runs())
    (project.folder / "mlflow.db").unlink()
    shutil.rmtree(project.folder / "mlruns")
    both = [project.start_stage("train") for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("another process is already making this state; waiting for it" in output for output in outputs) == 1
    assert all_outs(project) == expected
    assert statuses(project, "train") == ["FINISHED"]
    assert runs == len(STAGES)
    result = points(project)
    repeated = {point for point in result if result.count(point) > 1 and "/compile_" not in point[1]}
    assert not {name for _, name, _ in repeated if not name.startswith(("time/", "train/time"))}


def test_ctrl_c_stops_dvc_repro_and_the_next_one_resumes(project: Project) -> None:
    project.set("train.epochs", 150)
    project.set("runtime.checkpoint_seconds", 0.001)
    written = (project.folder / ".gradtrail" / "resume").glob
    process = project.start_dvc("repro", "train")
    output, seconds = stop(process, signal.SIGINT, when=lambda: any(written("*/step_?????????")))
    assert process.returncode != 0
    assert "train: stopped after step " in output
    assert seconds < 60, "the training would have gone on for longer"
    assert "KILLED" in statuses(project, "train")
    assert "train: resuming after step " in project.dvc("repro", "train")
    assert set(statuses(project, "train")) == {"FINISHED"}
