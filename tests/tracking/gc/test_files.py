"""Which files are garbage, and that files in use are left alone. Runs: `tests/contracts/runs`."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from filelock import FileLock

from gradtrail.support.paths import COMPLETE, USER
from gradtrail.tracking.gc.files import (
    Garbage,
    checkpoints,
    forget_old_members,
    leftover_outs,
    open_checkpoints,
)

MADE, OTHER, LEFT = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    return tmp_path


def put(path: str, content: str = "") -> Path:
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(content)
    return place


def checkpoint(state: str, *, days: float = 0) -> Path:
    seal = put(f".gradtrail/resume/{state[:32]}-cpu1/step_000000001.digest", "12345")
    then = time.time() - days * 86_400
    for path in (seal, seal.parent):
        os.utime(path, (then, then))
    return seal.parent


def remove(garbage: Iterable[Garbage]) -> None:
    for one in garbage:
        one.remove()


def test_checkpoints_of_complete_trainings_are_removed_and_others_after_a_month() -> None:
    made, young, old = checkpoint(MADE), checkpoint(OTHER, days=29), checkpoint(LEFT, days=31)
    assert open_checkpoints({MADE}) == {OTHER[:32]}
    garbage = list(checkpoints({MADE}))
    assert {one.name: (one.why, one.size_bytes) for one in garbage} == {
        made.name: ("its training is complete", 5),
        old.name: ("stopped 31 days ago", 5),
    }
    remove(garbage)
    assert young.exists()
    assert not made.exists()
    assert not old.exists()
    assert not list(Path(".gradtrail/locks").iterdir())


def test_complete_members_stay_and_keep_the_run_that_they_are_for() -> None:
    """Whatever else is recorded: they are for trainings with other members, one of which was stopped."""
    folder = checkpoint(MADE)
    (folder / COMPLETE).touch()
    (folder / USER).write_text(LEFT)
    assert list(checkpoints({MADE})) == []
    assert open_checkpoints({MADE}) == {MADE[:32], LEFT[:32]}
    then = time.time() - 31 * 86_400
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))
    (item,) = checkpoints({MADE})
    assert item.why == "a member that was not used for 31 days"


def test_complete_members_used_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrail.tracking.gc.files.MAX_MEMBERS", 2)
    folders = [checkpoint(digit * 64) for digit in "12345"]
    for age, folder in enumerate(folders[:4]):
        (folder / COMPLETE).touch()
        os.utime(folder / COMPLETE, (age + 1.0, age + 1.0))
    with FileLock(put(f".gradtrail/locks/train-{'2' * 32}.lock")):
        forget_old_members()
    assert [folder.exists() for folder in folders] == [False, True, True, True, True], "in use, new, and not complete"


def test_a_checkpoint_in_use_is_kept() -> None:
    folder = checkpoint(MADE)
    lock = put(f".gradtrail/locks/train-{MADE[:32]}.lock")
    (item,) = checkpoints({MADE})
    with FileLock(lock):
        assert list(checkpoints({MADE})) == []
        item.remove()  # of before
        assert folder.exists()
    item.remove()
    assert not folder.exists()
    assert lock.exists()


def test_leftovers_of_a_killed_stage_are_removed_unless_it_is_writing() -> None:
    put(".outs/train/models/final", "123")
    put(".outs/train.old/results/metrics/train.json", "12")
    put(".outs/evaluate/words")
    for stage in ("train", "evaluate"):
        put(f".outs/{stage}.lock")
    with FileLock(".outs/evaluate.lock"):
        garbage = list(leftover_outs())
        assert {one.name: one.size_bytes for one in garbage} == {".outs/train": 3, ".outs/train.old": 2}
        remove(garbage)
    assert sorted(path.name for path in Path(".outs").iterdir()) == ["evaluate", "evaluate.lock", "train.lock"]
