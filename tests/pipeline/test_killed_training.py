"""A training that is killed at any moment goes on at the next call, and ends with the bytes of one that was not."""

import contextlib
import dataclasses
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from projects import Project, copy_project, environment

from gradtrail.io.digests import digest

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

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline.train"],
            cwd=self.project.folder,
            env=environment() | {"PYTHONPATH": str(self.project.folder / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def stop(self, moment: Moment, number: signal.Signals) -> tuple[int, str, float]:
        """Start, send a signal at a moment, and return the exit status, the output and the seconds it took to end."""
        process = self.start()
        folder = self.project.folder / ".gradtrail" / "resume"
        while not moment(folder) and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(number)
        sent = time.monotonic()
        output, _ = process.communicate(timeout=60)
        return process.returncode, output, time.monotonic() - sent

    def finish(self) -> str:
        process = self.start()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output

    def outs(self) -> dict[str, str]:
        return {out: digest(self.project.folder / out) for out in OUTS}

    def points(self, metric: str) -> list[int]:
        """Return the steps of every point of a curve of the one row."""
        query = "select step from metrics where key = ? order by step"
        with contextlib.closing(sqlite3.connect(self.project.folder / "mlflow.db")) as store:
            return [step for (step,) in store.execute(query, (metric,))]


def sealed(count: int) -> Moment:
    """When so many steps at least lie behind the last whole checkpoint."""
    return lambda folder: any(int(path.stem.split("_")[1]) >= count for path in folder.glob("*/step_*.digest"))


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
    (row,) = training.project.rows_of("train")
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
    (row,) = training.project.rows_of("train")
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
