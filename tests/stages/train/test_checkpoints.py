"""Checkpoints of an unfinished training, with made-up arrays: content, timing, full disks and damage."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from factories import run_keys

from gradtrail.core.train.step import TrainState
from gradtrail.stages.train.checkpoints import Checkpoints, state_on_device, state_on_host


def parts(step: int) -> dict[str, Any]:
    """A state, and a history that grows from step to step, as no training has them."""
    rng = np.random.default_rng(step)
    weights = {"layers": {0: {"kernel": rng.normal(size=(4, 3)).astype(np.float32), "bias": np.zeros(3, np.float32)}}}
    state = TrainState(
        step=np.int32(step),
        params=weights,
        opt_state=(optax.EmptyState(), optax.TraceState(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights))),
        keys=run_keys(step),
        average=None,
        loss_scale=None,
    )
    kept = {f"kept.{number}.epoch": np.array(number) for number in range(step)}
    history = {"loss": rng.normal(size=step), "epochs": np.zeros((0, 6)), "seconds": np.array(2.5)} | kept
    return {"state": jax.device_put(state), "history": history}


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, lambda step=step: parts(step))


def restored_step(folder: Path) -> int | None:
    """Return the step of the checkpoint that would be resumed from, once its arrays equal those that were saved."""
    restored = Checkpoints(folder, 0.0).restore({"state": parts(1)["state"]})
    if restored is None:
        return None
    step = int(restored["state"].step)
    assert bits(restored) == bits(parts(step) | {"state": state_on_host(parts(step)["state"])})
    return step


def bits(tree: object) -> list[tuple[object, ...]]:
    return [(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("step", [0, 7])
def test_restored_parts_have_the_bits_shapes_and_devices_of_the_saved_ones(step: int, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new", 0.0)
    like = parts(1)["state"]
    assert checkpoints.restore({"state": like}) is None
    save(checkpoints, step)
    assert restored_step(tmp_path / "new") == step
    restored = Checkpoints(tmp_path / "new", 0.0).restore({"state": like, "history": None, "records": like})
    assert restored is not None
    assert restored["records"] is None
    assert restored["history"].keys() == parts(step)["history"].keys()
    state = state_on_device(restored["state"], like)
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), state) == jax.tree.map(
        lambda leaf: (leaf.dtype, leaf.sharding), parts(step)["state"]
    )
    assert bits(state_on_host(state)) == bits(state_on_host(parts(step)["state"]))


def test_a_resumed_training_reads_its_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Checkpoints(tmp_path, 0.0), 4, 5)
    read, steps = Checkpoints._read, list[int]()
    monkeypatch.setattr(Checkpoints, "_read", lambda self, step: [steps.append(step), read(self, step)][1])
    assert restored_step(tmp_path) == 5
    assert steps == [5]


def test_saved_arrays_are_copies(tmp_path: Path) -> None:
    array = np.zeros(1_000_000)
    checkpoints = Checkpoints(tmp_path, 0.0)
    checkpoints.save_if_due(1, lambda: {"history": {"array": array}})
    array += 1.0
    checkpoints.save(2, lambda: {"history": {"array": array}})
    shutil.rmtree(tmp_path / "step_000000002")
    restored = Checkpoints(tmp_path, 0.0).restore({})
    assert restored is not None
    assert not restored["history"]["array"].any()


def test_checkpoints_are_written_when_due_and_last_two_are_kept(tmp_path: Path) -> None:
    now = 0.0
    checkpoints = Checkpoints(tmp_path / "new", 10.0, lambda: now, user="ab12")
    for step in range(1, 10):
        checkpoints.save_if_due(step, lambda step=step: parts(step))
        checkpoints._wait()
        now += 4.0  # due at the steps 4 (12 s) and 7 (24 s)
    assert names(tmp_path / "new") == ["step_000000004", "step_000000007", "user"]
    save(checkpoints, 9)
    assert names(tmp_path / "new") == ["step_000000007", "step_000000009", "user"]
    checkpoints.remove()
    assert not (tmp_path / "new").exists()


def test_last_checkpoint_of_a_complete_training_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 0.0)
    save(checkpoints, 4, 5)
    assert not checkpoints.is_complete
    checkpoints.keep(6, lambda: parts(6))
    assert checkpoints.is_complete
    assert names(tmp_path) == ["complete", "step_000000006"]
    assert restored_step(tmp_path) == 6


def test_folder_may_be_deleted_at_any_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints(tmp_path / "new", 0.0, user="ab12")
    save(checkpoints, 1, 2)
    shutil.rmtree(tmp_path / "new")
    save(checkpoints, 3, 4, 5)
    assert restored_step(tmp_path / "new") == 5
    assert names(tmp_path / "new") == ["step_000000004", "step_000000005", "user"]
    assert capfd.readouterr().err == ""


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(None, 0.0)
    for write in (checkpoints.save_if_due, checkpoints.save, checkpoints.keep):
        write(1, lambda: parts(1))
    checkpoints.remove()
    assert checkpoints.restore({}) is None
    assert names(tmp_path) == []


def test_full_disk_is_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    checkpoints = Checkpoints(tmp_path, 0.0)
    save(checkpoints, 1, 2)
    checkpoints.keep(3, lambda: parts(3))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("train: warning: a checkpoint could not be written: [Errno 28] it takes ")
    assert names(tmp_path) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of TensorStore's threads
def test_write_that_fails_is_a_warning_and_later_ones_succeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_files: Callable[[bool], None]
) -> None:
    checkpoints = Checkpoints(tmp_path, 0.0)
    save(checkpoints, 1)
    small_files(True)
    save(checkpoints, 2, 3)
    small_files(False)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("train: "))
    assert line.startswith("train: warning: a checkpoint could not be written: ")
    assert restored_step(tmp_path) == 1
    save(checkpoints, 5)
    assert restored_step(tmp_path) == 5


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> object:
    """Let no file grow beyond a few bytes: to whoever writes, a full disk."""
    resource, signal = pytest.importorskip("resource"), pytest.importorskip("signal")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda on: resource.setrlimit(resource.RLIMIT_FSIZE, (64 if on else before[0], before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


# Checkpoints that are damaged or incomplete.


@pytest.fixture
def written(tmp_path: Path, good: Path) -> Path:
    """A folder with the checkpoints after the steps 4 and 5."""
    return shutil.copytree(good, tmp_path / "written")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save(Checkpoints(folder, 0.0), 4, 5)
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 3, 2 * len(data) // 3):
        data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of TensorStore's threads
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_damaged_file_is_harmless_or_the_previous_checkpoint_is_used(
    damage: Callable[[Path], None], good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    skipped = 0
    files = sorted(path for path in (good / "step_000000005").rglob("*") if path.is_file())
    for number, file in enumerate(files):
        copy = shutil.copytree(good, tmp_path / str(number))
        damage(copy / file.relative_to(good))
        step = restored_step(copy)
        output = capfd.readouterr().err
        assert (step, output.startswith("train: skipping the checkpoint of step 5: ")) in ((4, True), (5, False))
        assert step == 5 or names(copy) == ["step_000000004"], "it would be in the way of the next"
        skipped += step == 4
    assert skipped >= 3


def test_training_starts_over_if_all_checkpoints_are_damaged(written: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in written.iterdir():
        (folder / "_CHECKPOINT_METADATA").unlink()
    assert restored_step(written) is None
    assert capfd.readouterr().err.splitlines() == [
        f"train: skipping the checkpoint of step {step}: its arrays do not match their digest" for step in (5, 4)
    ]
    checkpoints = Checkpoints(written, 0.0)
    save(checkpoints, 4)
    assert restored_step(written) == 4


def test_incomplete_checkpoint_of_a_killed_process_is_removed(written: Path) -> None:
    (written / "step_000000005").rename(written / "step_000000005.orbax-checkpoint-tmp")
    assert restored_step(written) == 4
    save(Checkpoints(written, 0.0), 6)  # before Orbax writes, it has removed what it began to remove on opening
    assert names(written) == ["step_000000004", "step_000000006"]
