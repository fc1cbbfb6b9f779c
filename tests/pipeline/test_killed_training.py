"""A training that is killed at any moment goes on at the next call, and ends with the bytes of one that was not."""

import contextlib
import dataclasses
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from projects import Project, copy_project, stop

pytestmark = pytest.mark.slow

Moment = Callable[[Path], bool]
OUTS = ("models", "results/train", "metrics/train.json")
QUICK = {
    "fetch.dataset": "digits",
    "train.epochs": 8,
    "train.batch_size": 8,
    "train.mlp.hidden": [16],
    "train.mlp.dropout": 0.2,
    "train.augmentation.shift": 1.0,
    "train.keep_epochs": [0, 2],
    "runtime.checkpoint_seconds": 0.001,
    "runtime.steps_per_call": 1,
    "runtime.system_metrics": False,
}


@dataclasses.dataclass
class Training:
    """A project whose `train` is about to run, by hand."""

    project: Project

    def stop(self, moment: Moment, number: signal.Signals) -> tuple[int, str, float]:
        """Start, send a signal at a moment, and return the exit status, the output and the seconds it took to end."""
        process = self.project.start_stage("train")
        output, seconds = stop(process, number, when=lambda: moment(resume_folder(self.project)))
        return process.returncode, output, seconds

    def finish(self) -> str:
        return self.project.run_stage("train")

    def outs(self) -> dict[str, str]:
        return self.project.digests(*OUTS)

    def points(self, metric: str) -> list[int]:
        """Return the steps of every point of a curve of the one row."""
        query = "select step from metrics where key = ? order by step"
        with contextlib.closing(sqlite3.connect(self.project.folder / "mlflow.db")) as store:
            return [step for (step,) in store.execute(query, (metric,))]


def sealed(count: int, state: str = "") -> Moment:
    """When so many steps at least lie behind a whole checkpoint, if asked of the state that begins so."""
    pattern = f"{state}*/step_*.digest"
    return lambda folder: any(int(path.stem.split("_")[1]) >= count for path in folder.glob(pattern))


def while_writing(folder: Path) -> bool:
    """When a checkpoint is under way after others were sealed."""
    seals = {path.stem for path in folder.glob("*/step_*.digest")}
    return bool(seals) and any(
        path.name.split(".")[0] not in seals for path in folder.glob("*/step_*") if path.is_dir()
    )


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    project = copy_project(tmp_path_factory.mktemp("killed") / "project")
    for key, value in QUICK.items():
        project.set(key, value)
    project.dvc("repro", "preprocess")
    return Training(project)


@pytest.fixture(scope="module")
def expected(training: Training) -> dict[str, str]:
    """The outs of a training that nobody stopped."""
    assert training.finish() == ""
    assert not list((training.project.folder / ".gradtrail/resume").glob("*/step_*")), "a complete one needs none"
    return training.outs()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(while_writing, id="while writing"),
        pytest.param(sealed(1), id="early"),
        pytest.param(sealed(300), id="late"),
    ],
)
def test_after_a_kill_the_bytes_are_the_same(moment: Moment, training: Training, expected: dict[str, str]) -> None:
    status, _, _ = training.stop(moment, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert training.outs() == expected, "the outs of before stand"
    assert "train: going on after step " in training.finish()
    assert training.outs() == expected
    (row,) = training.project.runs_of("train")
    assert row["status"] == "FINISHED"
    assert training.points("train/loss") == list(range(1, 9))
    assert len(training.points("steps/loss")) == len(set(training.points("steps/loss")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_writes_a_checkpoint_and_says_how_to_go_on(
    number: signal.Signals, training: Training, expected: dict[str, str]
) -> None:
    status, output, seconds = training.stop(sealed(10), number)
    assert status == 128 + number
    line = output.splitlines()[-1]
    assert line.startswith("train: stopped after step ")
    assert line.endswith("; `dvc repro` goes on from there")
    assert seconds < 5
    (row,) = training.project.runs_of("train")
    assert row["status"] == "KILLED"
    step = int(line.split()[4].replace(",", ""))
    assert f"train: going on after step {step:,}, from a checkpoint" in training.finish()
    assert training.outs() == expected


def test_a_damaged_checkpoint_is_passed_over(training: Training, expected: dict[str, str]) -> None:
    training.stop(sealed(30), signal.SIGKILL)
    last = sorted((training.project.folder / ".gradtrail/resume").glob("*/step_*.digest"))[-1]
    last.write_text("0" * 32)
    output = training.finish()
    assert f"{last.stem} is no whole checkpoint" in output
    assert training.outs() == expected


@pytest.fixture
def committed(training: Training, tmp_path: Path) -> Project:
    """A copy whose data are prepared, for experiments."""
    project = Project(shutil.copytree(training.project.folder, tmp_path / "project", symlinks=True))
    for path in (project.folder / "models", project.folder / "results" / "train"):
        shutil.rmtree(path, ignore_errors=True)  # made by hand, and so known to nobody
    project.dvc("repro", "preprocess")
    project.commit("prepared")
    return project


def written(row: dict[str, Any]) -> dict[str, str]:
    """Return the digests of what a row's process wrote, by path."""
    marked = {name: value for name, value in row["tags"].items() if name.startswith("output/")}
    return {name.removeprefix("output/"): value for name, value in marked.items()}


def kill_one(project: Project) -> None:
    """Kill a training as soon as it has a whole checkpoint of its own: its state stands in the lock that it holds."""
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline
        for process in project.processes("pipeline.train"):
            with contextlib.suppress(psutil.Error):
                locks = [Path(file.path) for file in process.open_files() if "/locks/train-" in file.path]
                if any(sealed(30, lock.stem.removeprefix("train-"))(resume_folder(project)) for lock in locks):
                    process.kill()
                    return
        time.sleep(0.01)


def resume_folder(project: Project) -> Path:
    return project.folder / ".gradtrail" / "resume"


def test_an_experiment_in_a_temporary_folder_goes_on(committed: Project) -> None:
    command = ("exp", "run", "--temp", "-S", "train.seed=1", "train")
    process = committed.start(sys.executable, "-m", "dvc", *command)
    kill_one(committed)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert "train: going on after step " in committed.dvc(*command)
    (row,) = (row for row in committed.runs_of("train") if row["params"]["train.seed"] == "1")
    assert row["status"] == "FINISHED"
    committed.set("train.seed", 1)
    committed.run_stage("train")
    assert written(row) == committed.digests(*written(row))


def test_in_a_queue_with_four_workers_a_killed_one_goes_on_when_it_is_queued_again(committed: Project) -> None:
    committed.set("train.epochs", 60)
    committed.git("commit", "-qam", "longer")
    committed.dvc("exp", "run", "--queue", "-S", "train.seed=1,2,3,4", "train")
    committed.start_queue(4)
    kill_one(committed)
    assert committed.wait_for_queue().count("Success") == 3
    assert len(list(resume_folder(committed).iterdir())) == 1, "the complete ones left nothing behind"
    (failed,) = (row for row in committed.runs_of("train") if row["status"] in ("RUNNING", "KILLED"))
    seed = failed["params"]["train.seed"]
    again = committed.dvc("exp", "run", "--temp", "-S", f"train.seed={seed}", "train")
    assert "train: going on after step " in again
    rows = [row for row in committed.runs_of("train") if row["params"]["train.epochs"] == "60"]
    assert sorted(row["params"]["train.seed"] for row in rows) == ["1", "2", "3", "4"]
    assert {row["status"] for row in rows} == {"FINISHED"}
    committed.set("train.seed", int(seed))
    committed.run_stage("train")
    assert written(failed) == {}
    assert [found for row in rows if (found := written(row)) == committed.digests(*found)] == [
        written(row) for row in rows if row["params"]["train.seed"] == seed
    ]


KINDS = {
    "mlp with dropout and augmentation": {
        "train.mlp.dropout": 0.2,
        "train.augmentation.shift": 1.0,
        "train.augmentation.rotation": 10.0,
    },
    "cnn in float16": {
        "train.model": "cnn",
        "train.cnn.channels": [4, 8],
        "train.cnn.hidden": [16],
        "train.precision": "float16",
    },
    "schedule-free": {"train.optimizer": "schedule_free"},
}
KILLS = 50


def test_fifty_kills_at_random_moments_change_no_byte(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    quick = {**QUICK, "train.epochs": 4, "train.mlp.dropout": 0.0, "train.augmentation.shift": 0.0}
    shares = np.array_split(np.arange(KILLS), len(KINDS))
    kills = 0
    for (name, params), share in zip(KINDS.items(), shares, strict=True):
        project = copy_project(tmp_path / name.replace(" ", "_"))
        for key, value in {**quick, **params}.items():
            project.set(key, value)
        project.dvc("repro", "preprocess")
        training = Training(project)
        training.finish()
        straight, started = training.outs(), time.monotonic()
        training.finish()
        whole = time.monotonic() - started
        for _ in share:
            at = time.monotonic() + rng.uniform(0, whole)
            training.stop(lambda _, at=at: time.monotonic() >= at, signal.SIGKILL)
            kills += 1
            if rng.uniform() < 0.5:  # else the next kill hits the same training
                training.finish()
                assert training.outs() == straight, f"{name}, kill {kills}"
        training.finish()
        assert training.outs() == straight, name
    assert kills == KILLS
