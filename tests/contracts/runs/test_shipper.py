"""A stage and the shipper of its record, each killed while the other works: the results stand, no run is lost."""

import subprocess
import time
from typing import Any

import psutil
import pytest
from projects import Project, besides_progress

from gradtrail.tracking.tags import PROCESS, is_alive

pytestmark = pytest.mark.slow

MODULE, LR = "gradtrail.tracking", "train.adamw.learning_rate"
OF_THE_PROJECT = ("moved or copied from ", "no weights file of this project")  # whose weights are words


@pytest.fixture
def project(project: Project) -> Project:
    """A small project whose stages wait at their work, while there is a file `.git/hold`."""
    project.set(LR, 0.5)  # a state that has no run yet
    (project.folder / ".git/hold").touch()
    return project


def start(project: Project) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start the stage; return its process and that of the shipper, once its run is open."""
    stage = project.start_stage("train", "env")  # the real interpreter, of which the shipper is a process too
    deadline = time.monotonic() + 120
    while not any(run["status"] == "RUNNING" and "attempts" in run["tags"] for run in runs(project)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (shipper,) = project.processes(MODULE)
    return stage, shipper


def runs(project: Project) -> list[dict[str, Any]]:
    return [run for run in project.runs_of("train") if run["params"].get(LR) == "0.5"]


def statuses(project: Project) -> list[str]:
    return [run["status"] for run in runs(project)]


def go_on(project: Project, stage: subprocess.Popen[str]) -> list[str]:
    """Let the stage end; return what it printed, but for what it says of a small project that was copied."""
    (project.folder / ".git/hold").unlink()
    output, _ = stage.communicate(timeout=120)
    assert stage.returncode == 0, output
    return besides_progress(line for line in output.splitlines() if not any(words in line for words in OF_THE_PROJECT))


def test_shipper_outlives_its_stage_serves_the_next_one_and_ends(project: Project) -> None:
    stage, shipper = start(project)
    (run,) = runs(project)
    assert f":{stage.pid}:" in run["tags"][PROCESS]
    assert is_alive(run["tags"])
    assert go_on(project, stage) == []  # reads until the end of the stream
    assert shipper.is_running()
    assert statuses(project) == ["FINISHED"]
    project.run_stage("evaluate", "env")
    assert [process.pid for process in project.processes(MODULE)] == [shipper.pid]
    shipper.wait(timeout=60)
    assert not list(project.folder.glob(".gradtrail/records/*"))


def test_shipper_that_is_killed_costs_nothing_and_sync_completes_its_run(project: Project) -> None:
    stage, shipper = start(project)
    shipper.kill()
    assert go_on(project, stage) == []
    assert statuses(project) == ["RUNNING"]
    project.sync()  # DVC did not record the state: it is the record that has the outputs
    (run,) = runs(project)
    assert (run["status"], run["tags"]["attempts"], "rebuilt" in run["tags"]) == ("FINISHED", "1", False)
    assert sorted(run["outs"]) == ["models/final.safetensors", "results/metrics/train.json"]
    assert (run["artifacts"] / "timings.json").exists()
