"""The checkpoints of complete members. Other folders, and runs: `tests/contracts/runs/test_garbage.py`."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from gradtrail.support.paths import COMPLETE
from gradtrail.tracking import leftovers as files


def test_complete_members_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.setattr(files, "_MAX_MEMBERS", 2)
    folders = [tmp_path / f".gradtrail/resume/{digit * 32}-cpu1" for digit in "12345"]
    for age, folder in enumerate(folders):
        folder.mkdir(parents=True)
        if age < 4:
            (folder / COMPLETE).touch()
            os.utime(folder / COMPLETE, (age + 1.0, age + 1.0))
    lock = tmp_path / f".gradtrail/locks/train-{'2' * 32}.lock"
    lock.parent.mkdir()
    with FileLock(lock):
        files.forget_old_members()
    assert [folder.exists() for folder in folders] == [False, True, True, True, True], "in use, new, and not complete"
