"""A reader sees the old bytes or the new ones, whatever happens in between."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradtrail.stages.common.files import (
    atomic_file,
    changed_files,
    scratch_folder,
    stamps_of,
    write_json,
    writing_outs,
)
from gradtrail.support.errors import environment_error

OUTS = ("models", "results/metrics/train.json")


def files_under(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def outs_under(folder: Path) -> dict[str, str]:
    return {path: text for path, text in files_under(folder).items() if not path.startswith(".outs/")}


def both(text: str) -> dict[str, str]:
    return {"models/sub/weights": text, "results/metrics/train.json": text}


def write_outs(folder: Path, text: str) -> None:
    with writing_outs(OUTS, folder, "train") as new:
        (new / "models" / "sub").mkdir(parents=True)
        (new / "models" / "sub" / "weights").write_text(text)
        (new / "results" / "metrics" / "train.json").write_text(text)


def write_files(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


def fail_after_writing(path: Path, fault: type[BaseException]) -> None:
    path.write_text("half")
    raise fault


def test_atomic_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with atomic_file(path) as temporary:
        temporary.write_text("old")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), atomic_file(path) as temporary:
        fail_after_writing(temporary, ZeroDivisionError)
    assert files_under(tmp_path) == {"folder/file": "old"}


def test_symlink_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for text in ("old", "new"):
        with atomic_file(tmp_path / "link") as temporary:
            temporary.write_text(text)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_equal_content_is_equal_bytes_with_sorted_keys_and_nan_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "left", {"b": 1, "a": {"d": 2, "c": 3}})
    write_json(tmp_path / "right", {"a": {"c": 3, "d": 2}, "b": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "left", {"loss": float("nan")})
    assert (tmp_path / "left").read_bytes() == (tmp_path / "right").read_bytes()
    assert json.loads((tmp_path / "left").read_text()) == {"a": {"c": 3, "d": 2}, "b": 1}


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
def test_new_outs_replace_previous_ones_which_stay_after_an_error(fault: type[BaseException], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "left_over").write_text("old")
    write_outs(tmp_path, "first")
    write_outs(tmp_path, "second")
    with pytest.raises(fault), writing_outs(OUTS, tmp_path, "train") as new:
        fail_after_writing(new / "results" / "metrics" / "train.json", fault)
    assert outs_under(tmp_path) == both("second")


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (["models/weights"], r"outs not written: \['results/metrics/train.json'\]"),
        (["models/weights", "results/metrics/train.json", "models_too"], r"declared as outs: \['models_too'\]"),
    ],
)
def test_outs_are_exactly_those_declared(written: list[str], reason: str, tmp_path: Path) -> None:
    write_outs(tmp_path, "old")
    with pytest.raises(RuntimeError, match=reason), writing_outs(OUTS, tmp_path, "train") as new:
        write_files(new, written)
    assert outs_under(tmp_path) == both("old")


@pytest.mark.parametrize("renames", range(4))
def test_kill_never_leaves_a_mixture_of_outs(renames: int, tmp_path: Path) -> None:
    write_outs(tmp_path, "old")
    script = f"""
import os, signal
from pathlib import Path
from gradtrail.stages.common.files import writing_outs
rename, count = Path.rename, 0
def counting(self, target):
    global count
    if count == {renames}:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    return rename(self, target)
with writing_outs({OUTS!r}, Path({str(tmp_path)!r}), "train") as new:
    (new / "models" / "sub").mkdir(parents=True)
    (new / "models" / "sub" / "weights").write_text("new")
    (new / "results" / "metrics" / "train.json").write_text("new")
    Path.rename = counting
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(set(outs_under(tmp_path).values())) <= 1
    write_outs(tmp_path, "after")
    assert outs_under(tmp_path) == both("after")


@pytest.mark.parametrize("renames", range(4))
def test_failed_rename_restores_previous_outs(renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_outs(tmp_path, "old")
    rename, done = Path.rename, []

    def failing(self: Path, target: Path) -> Path:
        done.append(self)
        if len(done) == renames + 1:
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PermissionError):
        write_outs(tmp_path, "new")
    assert outs_under(tmp_path) == both("old")


def test_second_writer_waits_for_the_first(tmp_path: Path) -> None:
    second = threading.Thread(target=write_outs, args=(tmp_path, "second"))
    with writing_outs(OUTS, tmp_path, "train") as new:
        second.start()
        second.join(timeout=0.3)
        assert second.is_alive()
        (new / "models").mkdir()
        (new / "results" / "metrics" / "train.json").write_text("first")
    second.join()
    assert outs_under(tmp_path) == both("second")


@pytest.mark.parametrize("writing", ["outs", "scratch", "file"])
def test_full_disk_is_reported_with_the_file_that_was_being_written(writing: str, tmp_path: Path) -> None:
    context = {
        "outs": lambda: writing_outs(OUTS, tmp_path, "train"),
        "scratch": lambda: scratch_folder(tmp_path, "train"),
        "file": lambda: atomic_file(tmp_path / "last"),
    }[writing]

    def fill() -> None:
        with context() as path:
            for number, name in enumerate(() if writing == "file" else ("first", "last")):
                (path / name).touch()
                os.utime(path / name, (number, number))
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        fill()
    assert Path(caught.value.filename).name == "last"
    assert environment_error(caught.value) == f"{caught.value.filename}: No space left on device"


# What happens between two looks → whether data may have had other content meanwhile
TOUCHES = {
    "mv a/file b; echo other > a/file; mv b a/file": True,
    "cp -p a/file b; echo other > a/file; cp -p b a/file": True,  # into the same file, with its time
    "mv a/link b; mv b a/link": True,
    "echo other > cached": True,
    "rm a/sub/file": True,
    "echo new > a/sub/new": True,
    "cat a/file a/sub/file": False,
    "echo out > a/out; mkdir -p results": False,  # another stage writes its outs into the same folder
    "mkdir a/sub/__pycache__; touch a/sub/__pycache__/x.pyc a/sub/.DS_Store": False,
    "ln a/hard b": False,  # DVC checks the file out of its cache for another folder
}


@pytest.mark.parametrize(("command", "is_touched"), TOUCHES.items())
def test_data_that_were_touched_have_other_stamps(
    command: str, is_touched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make = "mkdir -p a/sub; echo 1 > a/file; echo 2 > a/sub/file; echo 3 > cached; ln -s ../cached a/link"
    subprocess.run(["sh", "-c", f"{make}; echo 4 > cache; ln cache a/hard"], check=True)
    paths = [Path("a", name) for name in ("file", "sub", "link", "hard")]
    stamps = stamps_of(paths)
    time.sleep(0.05)  # the clock of the file system ticks
    subprocess.run(["sh", "-c", command], check=True)
    changed = changed_files(stamps, stamps_of(paths))
    assert bool(changed) == is_touched, changed
