"""Checkpoints of an unfinished training, made up here: content, timing, full disks and damage."""

import gc
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from factories import run_keys

from gradtrail.core.train.gradient import RowRecord
from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.step import StepRecord, TrainState
from gradtrail.stages.train.checkpointing import Progress, ResumeFolder

STATE = "ab12-cpu1"  # a folder's name
STEPS = 3  # in an epoch, of 4 examples each


def weights(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"layers": {0: {"kernel": rng.normal(size=(4, 3)).astype(np.float32), "bias": np.zeros(3, np.float32)}}}


def make_chunk(step: int) -> Chunk:
    """Chunk after a step of a training that never was."""
    rng = np.random.default_rng(step)
    names = ("loss", "cross_entropy", "accuracy", "grad_norm")
    numbers = {name: rng.normal(size=STEPS).astype(np.float32) for name in names}
    probability = rng.uniform(size=(STEPS, 4)).astype(np.float32)
    rows = RowRecord(
        indices=np.arange(4 * STEPS, dtype=np.int32).reshape(STEPS, 4),
        probability=probability,
        correct=probability > 0.5,
    )
    absent: dict[str, Any] = {"part_grad_norm": None, "loss_scale": None, "skipped": None}
    records = StepRecord(
        num_examples=np.full(STEPS, 4, np.int32), learning_rate=numbers["loss"], rows=rows, **numbers, **absent
    )
    state = TrainState(
        step=np.int32(step),
        params=weights(step),
        opt_state=(optax.EmptyState(), optax.TraceState(weights(step + 1))),
        keys=run_keys(step),
        average=None,
        loss_scale=None,
    )
    state, records = jax.device_put((state, records))
    return Chunk(epoch=1 + (step - 1) // STEPS, ends_epoch=step % STEPS == 0, step=step, state=state, records=records)


def make_history(step: int) -> History:
    history = History((0, 1), weights(0))
    for end in range(STEPS, step + 1, STEPS):
        history.add(make_chunk(end), weights(end), {"loss": 1.0, "accuracy": 0.5})
    return history


def save(folder: ResumeFolder, *steps: int) -> None:
    for step in steps:
        folder.save(make_chunk(step), make_history(step), seconds=2.5)


def load(folder: Path) -> Progress | None:
    like = make_chunk(1)
    new_history = History((0, 1), weights(0))
    return ResumeFolder(folder, 0.0, lambda: 0.0).load(like.state, like.records, new_history.restore)


def bits(tree: object) -> list[bytes]:
    plain = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if "key" in str(leaf.dtype) else leaf, tree)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("step", [1, 3, 4, 9])
def test_checkpoint_round_trips_to_the_bit(step: int, tmp_path: Path) -> None:
    save(ResumeFolder(tmp_path, 0.0, lambda: 0.0), step)
    progress, chunk, history = load(tmp_path), make_chunk(step), make_history(step)
    assert progress is not None
    assert (progress.step, progress.seconds) == (step, 2.5)
    assert bits(progress.state) == bits(chunk.state)
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), progress.state) == jax.tree.map(
        lambda leaf: (leaf.dtype, leaf.sharding), chunk.state
    )
    assert (progress.records is None) == chunk.ends_epoch
    assert progress.records is None or bits(progress.records) == bits(chunk.records)
    assert bits(progress.history.as_arrays()) == bits(history.as_arrays())


def test_checkpoints_are_written_when_due_and_last_two_are_kept(tmp_path: Path) -> None:
    now = 0.0
    folder = ResumeFolder(tmp_path / STATE, 10.0, lambda: now)
    for step in range(1, 10):
        folder.tick(make_chunk(step), make_history(step), seconds=0.0)
        if folder._writing is not None:
            folder._checkpointer.wait()
        now += 4.0  # due at the steps 4 (12 s), 7 (24 s); what is under way is sealed at the next step
    assert names(tmp_path / STATE) == [f"step_00000000{n}{end}" for n in (4, 7) for end in ("", ".digest")]
    save(folder, 9)
    assert names(tmp_path / STATE) == [f"step_00000000{n}{end}" for n in (7, 9) for end in ("", ".digest")]
    folder.remove()
    assert not (tmp_path / STATE).exists()


def test_full_disk_costs_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    folder = ResumeFolder(tmp_path / STATE, 0.0, lambda: 0.0)
    save(folder, 1)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("train: warning: a checkpoint could not be written: [Errno 28] it takes ")
    assert names(tmp_path / STATE) == []


def test_write_that_fails_costs_one_line_and_later_ones_succeed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    small_files: Callable[[bool], None],
) -> None:
    reported: list[Any] = []  # by threads, about what nobody waits for
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(error.exc_value))
    folder = ResumeFolder(tmp_path / STATE, 0.0, lambda: 0.0)
    save(folder, 1)
    small_files(True)
    save(folder, 2, 3, 4)
    small_files(False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: warning: a checkpoint could not be written: ")
    save(folder, 5)
    gc.collect()  # a future that failed and was never asked tells of itself when it goes
    assert capsys.readouterr().err == ""
    assert (reported, [record for record in caplog.records if record.levelno >= logging.WARNING]) == ([], [])
    progress = load(tmp_path / STATE)
    assert progress is not None
    assert progress.step == 5


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> object:
    """Let no file grow beyond a few bytes: to whoever writes, a full disk."""
    resource, signal = pytest.importorskip("resource"), pytest.importorskip("signal")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda on: resource.setrlimit(resource.RLIMIT_FSIZE, (64 if on else before[0], before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


# Checkpoints that are damaged, half written or another training's.


@pytest.fixture
def written(tmp_path: Path, good: Path) -> Path:
    """A folder with the checkpoints after the steps 4 and 5."""
    return shutil.copytree(good, tmp_path / STATE)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / STATE
    save(ResumeFolder(folder, 0.0, lambda: 0.0), 4, 5)
    return folder


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: cut(largest_file(folder)), "its files, step or training do not match its seal"),
        (lambda folder: flip(largest_file(folder)), "its files, step or training do not match its seal"),
        (lambda folder: largest_file(folder).unlink(), "its files, step or training do not match its seal"),
        (lambda folder: folder.with_suffix(".digest").unlink(), "it has no seal, so its write was interrupted"),
    ],
)
def test_damaged_checkpoint_is_skipped_for_the_previous_one(
    damage: Callable[[Path], None],
    reason: str,
    written: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from orbax.checkpoint import v1 as ocp

    opened: list[str] = []
    real = ocp.load_checkpointables
    monkeypatch.setattr(ocp, "load_checkpointables", lambda path, *rest: opened.append(path.name) or real(path, *rest))
    damage(written / "step_000000005")
    progress = load(written)
    assert progress is not None
    assert progress.step == 4
    assert opened == ["step_000000004"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"train: skipping the checkpoint step_000000005: {reason}"
    assert names(written) == ["step_000000004", "step_000000004.digest"], "it would be in the way of the next"


def test_checkpoint_of_another_training_is_not_used(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(written, tmp_path / "cd34-cpu1")
    assert load(other) is None
    assert capsys.readouterr().err.count("train: skipping the checkpoint step_") == 2
    assert names(other) == []
