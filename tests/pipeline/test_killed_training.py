"""A training that is killed resumes at the next call, and ends with the bytes of one that was not.

Most kills are at set places of the code: a process that runs the stage with SIGKILL put there. At night there are kills
at random moments too; `tests/stages/train/test_training.py` stops after every step, within one process.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from fuzzing import status_bytes
from projects import ROOT, Project, copy_project, stop
from warm_python import warm_python

from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.stages.data.data_files import read_info, write_info

pytestmark = pytest.mark.slow
OUTS = read_pipeline(ROOT / "dvc.yaml")["train"].outs
QUICK = {
    "fetch.dataset": "digits",
    "train.epochs": 3,
    "train.batch_size": 16,
    "train.mlp.hidden": [16],
    "train.mlp.dropout": 0.2,
    "train.augmentation.shift": 1.0,
    "train.keep_epochs": [0, 2],
    "runtime.checkpoint_seconds": 0.001,
    "runtime.steps_per_call": 1,
    "runtime.system_metrics": False,
}

# Runs the stage with a function of the project replaced by one that ends the process at one of its calls. The first
# checkpoints are waited for, so that there is one to go on from, however short the training is.
STAGE_WITH_A_KILL = """
import importlib, os, sys
from gradtrail.stages.train.checkpoints import Checkpoints

save_if_due, waited = Checkpoints.save_if_due, []

def waiting(self, *now):
    save_if_due(self, *now)
    if self._manager is not None and len(waited) < 3:
        waited.append(now)
        self._manager.wait_until_finished()

Checkpoints.save_if_due = waiting
module, owner, name, call, first, number = sys.argv[1:]
place = getattr(importlib.import_module(module), owner) if owner else importlib.import_module(module)
real, calls = getattr(place, name), []

def killing(*args, **kwargs):
    calls.append(args)
    if len(calls) == int(call) and first == "before":
        os.kill(os.getpid(), int(number))
    result = real(*args, **kwargs)
    if len(calls) == int(call) and first == "after":
        os.kill(os.getpid(), int(number))
    return result

setattr(place, name, killing)
from gradtrail.stages.common.stage import run_stage
from pipeline.train import main
run_stage(main, "train")
"""
HISTORY, TRACKING = "gradtrail.core.train.history", "gradtrail.tracking"
ATOMICITY = "orbax.checkpoint._src.path.atomicity"  # whose `finalize` renames the two folders of a checkpoint
KILLS = {
    "at a chunk": (HISTORY, "History", "check", 150, "before"),
    "while a checkpoint is written": (ATOMICITY, "AtomicRenameTemporaryPath", "finalize", 4, "before"),
    "between the outs and their log": (f"{TRACKING}.live", "LiveRun", "outs", 1, "before"),
    "while its record is closed": (f"{TRACKING}.live", "LiveRun", "end", 1, "before"),
}


@dataclasses.dataclass
class Training:
    """A project whose `train` is about to run, by hand."""

    project: Project
    expected: dict[str, str] = dataclasses.field(default_factory=dict)

    def kill(self, *place: object, number: signal.Signals = signal.SIGKILL) -> str:
        """Run the stage until it comes to a place where it sends itself a signal; return what it printed."""
        process = start(self.project, *place, number=number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), output
        return output

    def finish(self) -> str:
        return self.project.run_stage("train")

    def outs(self) -> dict[str, str]:
        return self.project.digests(*OUTS)

    def points(self, metric: str) -> list[int]:
        """Return the steps of every point of a curve of the one run."""
        query = "select step from metrics where key = ? order by step"
        with contextlib.closing(sqlite3.connect(self.project.folder / "mlflow.db")) as store:
            return [step for (step,) in store.execute(query, (metric,))]


def start(project: Project, *place: object, number: signal.Signals) -> subprocess.Popen[str]:
    """Start the stage, which sends itself a signal at a place."""
    python = sys.executable if number == signal.SIGSTOP else str(warm_python())
    command = (python, "-c", STAGE_WITH_A_KILL, *map(str, place), str(int(number)))
    return project.start(*command, env={"PYTHONPATH": f"{project.folder / 'src'}"})


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training that was finished once, without a stop."""
    project = copy_project(tmp_path_factory.mktemp("killed") / "project")
    project.change(QUICK)
    for stage in ("fetch", "preprocess"):
        project.run_stage(stage)
    training = Training(project)
    training.finish()
    assert not list(resume_folder(project).glob("*/step_*")), "a complete one needs none"
    training.expected = training.outs()
    return training


@pytest.mark.parametrize("place", KILLS)
def test_after_a_kill_the_bytes_are_the_same(place: str, training: Training) -> None:
    training.kill(*KILLS[place])
    assert training.outs() == training.expected, "the outs of before stand, or are whole"
    assert list(resume_folder(training.project).glob("*/*.orbax-checkpoint-tmp")) or "written" not in place
    assert "train: resuming after step " in training.finish()
    assert training.outs() == training.expected
    (run,) = training.project.runs_of("train")
    assert run["status"] == "FINISHED"
    assert training.points("train/loss") == [1, 2, 3]
    assert len(training.points("steps/loss")) == len(set(training.points("steps/loss")))
    assert not list(resume_folder(training.project).glob("*/*"))


@pytest.fixture
def committed(training: Training, tmp_path: Path) -> Project:
    """A copy whose data are prepared, for experiments."""
    project = Project(shutil.copytree(training.project.folder, tmp_path / "project", symlinks=True))
    subprocess.run(("rm", "-rf", *OUTS), cwd=project.folder, check=True)  # made by hand, and so unknown to DVC
    project.set("train.epochs", 60)
    project.dvc("repro", "preprocess")
    project.commit("prepared")
    return project


def kill_one(project: Project) -> None:
    """Kill a training as soon as it has a whole checkpoint of its own: its network's key stands in a lock it holds."""
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline
        for process in project.processes():
            with contextlib.suppress(psutil.Error):
                states = [Path(file.path).stem for file in process.open_files() if "/locks/train-" in file.path]
                patterns = [f"{state.removeprefix('train-')}*/step_?????????" for state in states]
                if any(any(resume_folder(project).glob(pattern)) for pattern in patterns):
                    process.kill()
                    return
        time.sleep(0.01)


def resume_folder(project: Project) -> Path:
    return project.folder / ".gradtrail" / "resume"


@pytest.mark.nightly
def test_a_killed_one_of_a_queue_resumes_as_an_experiment_in_a_temporary_folder(committed: Project) -> None:
    """Wherever DVC runs the stage, its checkpoints lie in the repository, and its state is the same."""
    committed.dvc("exp", "run", "--queue", "-S", "train.seed=1,2", "train")
    committed.start_queue(2)
    kill_one(committed)
    assert committed.wait_for_queue().count("Success") == 1
    left = sorted(path.name.partition("-")[2] for path in resume_folder(committed).iterdir())
    assert left == ["attempts", "cpu1"], "the killed one left its times and its checkpoints, the complete one nothing"
    (failed,) = (run for run in committed.runs_of("train") if run["status"] in ("RUNNING", "KILLED"))
    assert failed["outs"] == {}
    seed = failed["params"]["train.seed"]
    again = committed.dvc("exp", "run", "--temp", "-S", f"train.seed={seed}", "train")
    assert "train: resuming after step " in again
    runs = [run for run in committed.runs_of("train") if run["params"]["train.epochs"] == "60"]
    assert sorted(run["params"]["train.seed"] for run in runs) == ["1", "2"]
    assert {run["status"] for run in runs} == {"FINISHED"}
    committed.set("train.seed", int(seed))
    committed.run_stage("train")
    (resumed,) = (run for run in runs if run["params"]["train.seed"] == seed)
    assert resumed["outs"] == committed.digests(*resumed["outs"])


@pytest.mark.nightly
def test_sync_and_gc_do_not_disturb_a_running_training(committed: Project, training: Training) -> None:
    committed.set("train.epochs", QUICK["train.epochs"])
    process = start(committed, *KILLS["at a chunk"], number=signal.SIGSTOP)
    try:
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert process.poll() is None
            time.sleep(0.01)
        assert any(resume_folder(committed).glob("*/step_?????????"))
        committed.sync()
        committed.gradtrail("gc", "--yes")
    finally:
        process.send_signal(signal.SIGCONT)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "warning" not in output, "neither its run nor its checkpoints were missed"
    assert committed.digests(*OUTS) == training.expected
    (run,) = committed.runs_of("train")
    assert run["status"] == "FINISHED"
    assert run["outs"] == committed.digests(*run["outs"])


@pytest.mark.nightly
@pytest.mark.skipif(not os.environ.get("MNIST_DIR"), reason="MNIST_DIR is not set: it names a folder with MNIST")
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_millions_of_examples_take_less_memory_than_they_have_and_a_kill_changes_no_byte(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    for key, value in {
        "train.model": "linear",
        "train.epochs": 1,
        "train.keep_epochs": [],
        "runtime.checkpoint_seconds": 0.1,
        "runtime.system_metrics": False,
    }.items():
        project.set(key, value)
    for stage in ("fetch", "preprocess"):
        project.run_stage(stage)
    processed = project.folder / "data/processed"
    for path in (processed / "train").iterdir():
        column = np.load(path)
        copies = np.lib.format.open_memmap(path, "w+", column.dtype, (40 * len(column), *column.shape[1:]))
        for start in range(0, len(copies), len(column)):
            copies[start : start + len(column)] = column
    info = read_info(processed)
    write_info(processed, dataclasses.replace(info, examples=info.examples | {"train": len(copies)}))
    size = sum(path.stat().st_size for path in processed.rglob("*") if path.is_file())
    training = Training(project)
    training.kill(HISTORY, "History", "check", 90, "before")
    assert "train: resuming after step " in training.finish()
    outs = training.outs()
    process, peak = project.start_stage("train"), 0
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):  # it has just ended
            peak = max(peak, status_bytes("RssAnon", process.pid))  # without the files that it maps
        time.sleep(0.05)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "resuming" not in output
    assert training.outs() == outs
    assert 0 < peak < 0.7 * size
    shutil.rmtree(project.folder / "data")  # pytest keeps the folders of the last runs


@pytest.mark.nightly
@pytest.mark.parametrize(
    "params",
    [
        {"train.mlp.dropout": 0.2, "train.augmentation.shift": 1.0, "train.augmentation.rotation": 10.0},
        {
            "train.model": "cnn",
            "train.cnn.channels": [4, 8],
            "train.cnn.hidden": [16],
            "train.precision": "float16",
        },
        {"train.average_decay": 0.9},
    ],
    ids=["mlp with dropout and augmentation", "cnn in float16", "averaged weights"],
)
def test_kills_at_random_moments_change_no_byte(params: dict[str, object], tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    project.change(QUICK | {"train.epochs": 4, "train.batch_size": 8} | params)
    project.dvc("repro", "preprocess")
    project.run_stage("train")
    expected, started = project.digests(*OUTS), time.monotonic()
    project.run_stage("train")
    duration = time.monotonic() - started
    rng, moments, starts = np.random.default_rng(), [], list[float]()  # starts of attempts, from the first with a trace
    for kill in range(17):
        moments.append(duration * rng.uniform())
        began, at = time.time(), time.monotonic() + moments[-1]
        stop(project.start_stage("train"), signal.SIGKILL, when=lambda at=at: time.monotonic() >= at)
        starts = [*starts, began] if any(resume_folder(project).glob("*-attempts/*")) else []  # none if it had ended
        if kill == 16 or rng.uniform() < 0.5:  # else the next kill hits the same training
            output, _ = (process := project.start_stage("train")).communicate()
            ended = time.time()
            assert process.returncode == 0, output
            project.wait_for_shipping()
            assert project.digests(*OUTS) == expected, f"killed after {moments} s"
            if starts:  # on a busy machine a process may start late, and needs time to exit
                unrecorded = ended - starts[0] - sum(seconds(project).values())
                assert -0.1 < unrecorded < max(2.5, 0.05 * (ended - starts[0])), "no second is counted twice"
            moments.clear()
            starts.clear()


def seconds(project: Project) -> dict[str, float]:
    """Return the seconds by cause, over all attempts, that the last execution recorded."""
    (run,) = project.runs_of("train")
    last = max(run["artifacts"].glob("timings*.json"), key=lambda path: path.stat().st_mtime)
    result: dict[str, float] = json.loads(last.read_text())["seconds"]
    return result
