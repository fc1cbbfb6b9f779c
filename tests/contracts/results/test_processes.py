"""A training by several processes: the same bytes for any number of them, one clean end, and resumption after kills.

The processes of a real project on the digits, on this machine: gloo on loopback.
"""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from projects import ROOT, Project, besides_progress, finished_project
from servers import free_port
from warm_python import warm_python

from gradtrail.stages.common.pipeline_file import read_pipeline

STAGES = read_pipeline(ROOT / "dvc.yaml")
SHARDS = 4
AGAIN = "; `dvc repro` resumes from the last checkpoint, if there is one"

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A training of four shards, with a checkpoint after every few steps."""
    project = finished_project().copy(tmp_path / "project")
    project.change({"runtime.tracking": False, "runtime.checkpoint_seconds": 0.001, "runtime.steps_per_call": 4})
    project.change({"train.shards": SHARDS, "train.epochs": 6})
    return project


def start(project: Project, count: int, python: str = sys.executable) -> subprocess.Popen[str]:
    command = (python, "-m", "gradtrail.cluster.launch", "-n", str(count), "pipeline.train")
    return project.start(*command, env={"PYTHONPATH": str(project.folder / "src")})


def train(project: Project, count: int) -> tuple[dict[str, str], str]:
    """Train to the end with so many processes; return the digests of the outs, and what was printed."""
    process = start(project, count, str(warm_python()))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return project.digests(*STAGES["train"].outs), output


def processes_of(launcher: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """The processes of a training, once all are there, in the order of their numbers, in which they are started."""
    while True:
        children = [
            child for child in psutil.Process(launcher.pid).children() if "pipeline/train.py" in child.cmdline()
        ]
        assert launcher.poll() is None
        if len(children) == count:
            return sorted(children, key=lambda child: child.pid)
        time.sleep(0.02)


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Read what a process prints until a line begins like this."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(words):
            return


def test_any_number_of_processes_writes_the_same_bytes_and_process_0_alone_has_a_run(project: Project) -> None:
    runs = len(project.runs_of("train"))
    one, _ = train(project, 1)
    project.set("runtime.tracking", True)
    two, output = train(project, 2)
    assert two == one
    assert "Gloo" not in output
    assert output.count("train: epoch 6 ") == 1, "process 0 alone tells of progress"
    assert len(project.runs_of("train")) == runs + 1
    assert project.runs_of("train")[0]["status"] == "FINISHED"
    assert not project.processes("pipeline/train.py")


@pytest.mark.parametrize("index", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_lost_process_ends_the_others_with_a_line_and_another_number_resumes_to_the_same_bytes(
    index: int, project: Project
) -> None:
    project.set("train.epochs", 15)  # so that all of this comes before the end, however busy the machine is
    before = project.digests(*STAGES["train"].outs)
    launcher = start(project, 2)
    processes = processes_of(launcher, 2)
    wait_for(launcher, "train: epoch 1 ")
    while not any((project.folder / ".gradtrail" / "resume").glob("*/step_?????????")):
        assert launcher.poll() is None
        time.sleep(0.005)
    listening = {
        connection.laddr.ip
        for item in processes
        for connection in item.net_connections()
        if connection.status == "LISTEN"
    }
    processes[index].send_signal(signal.SIGSTOP)
    sent = time.monotonic()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 2, output
    assert time.monotonic() - sent < 20, "twice the heartbeat"
    assert besides_progress(output.splitlines()) == [f"train: process {index} stopped responding{AGAIN}"]
    assert not any(item.is_running() for item in processes)
    assert project.digests(*STAGES["train"].outs) == before
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    resumed, output = train(project, 1)
    assert "resuming after step" in output
    shutil.rmtree(project.folder / ".gradtrail" / "resume")
    assert train(project, 1)[0] == resumed


def test_fault_of_one_process_is_a_line_with_its_number_and_its_traceback_is_in_its_log(project: Project) -> None:
    before = project.digests(*STAGES["train"].outs)
    code = project.folder / "pipeline/train.py"
    whole, begin = code.read_text(), "    training.run(NullListener()"  # of a process that follows process 0
    assert whole.count(begin) == 1
    code.write_text(whole.replace(begin, f"    1 / 0\n{begin}"))
    launcher = start(project, 2, str(warm_python()))
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 2, output
    (line,) = besides_progress(output.splitlines())
    assert re.fullmatch(r"train: process 1: ZeroDivisionError: division by zero; its traceback is in \S+/1\.log", line)
    assert "Traceback" in (project.folder / ".gradtrail/processes/1.log").read_text()
    assert project.digests(*STAGES["train"].outs) == before


@pytest.mark.nightly
def test_process_with_other_data_is_refused_in_a_line(project: Project, tmp_path: Path) -> None:
    """Each process has a copy of the project, and a launcher of its own, as on hosts without a shared file system."""
    other = project.copy(tmp_path / "other")
    other.set("train.epochs", 7)
    variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    command = (sys.executable, "-m", "gradtrail.cluster.launch", "pipeline.train")
    launchers = [
        copy.start(*command, env={"PYTHONPATH": str(copy.folder / "src"), "JAX_PROCESS_ID": str(index)} | variables)
        for index, copy in enumerate((project, other))
    ]
    outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [2, 2], outputs
    assert outputs[0] == f"train: process 1 stopped responding{AGAIN}\n"
    assert re.fullmatch(r"train: process 1: train of params\.yaml differs from that of process 0, on \S+\n", outputs[1])


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_all_at_one_step_with_a_checkpoint(number: signal.Signals, project: Project) -> None:
    project.set("train.epochs", 40)  # so that the signal comes before the end, however busy the machine is
    whole, _ = train(project, 1)
    launcher = start(project, 2)
    wait_for(launcher, "train: epoch 2 ")
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number, output
    last = output.splitlines()[-1]
    stopped = re.fullmatch(r"train: stopped after step (\d+) of \d+; `dvc repro` resumes from there", last)
    assert stopped, output
    resumed, output = train(project, 4)
    assert f"resuming after step {stopped[1]}, from a checkpoint" in output
    assert resumed == whole


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [
        {"train.model": "cnn", "train.optimizer": "muon", "train.average_decay": 0.9},
        {"train.members": 2, "train.patience": 1, "train.mlp.dropout": 0.5, "train.augmentation.shift": 2.0},
        {"train.privacy.enabled": True, "train.precision": "float32"},
    ],
    ids=lambda changes: " ".join(key.removeprefix("train.") for key in changes),
)
def test_all_kinds_of_training_have_the_same_bytes(changes: dict[str, object], project: Project) -> None:
    project.set("train.epochs", 2)
    project.change(changes)
    (one, _), (two, _), (four, _) = (train(project, count) for count in (1, 2, 4))
    assert one == two == four


@pytest.mark.nightly
def test_process_that_never_joins_is_named(project: Project) -> None:
    project.set("runtime.join_seconds", 5.0)
    launcher = start(project, 3)
    processes_of(launcher, 3)[1].send_signal(signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 2
    assert output == "train: process 1 did not connect within `runtime.join_seconds`\n"
