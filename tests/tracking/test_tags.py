"""The tag of a process says whether it still exists, that of a clone whose run it is."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gradtrail.tracking.tags import CLONE, PROCESS, SHARED, clone_id, clone_tag, is_alive, is_of_this_host, process_tags


def test_process_is_alive_until_it_ends() -> None:
    assert is_of_this_host(process_tags())
    assert is_alive(process_tags())
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    for other in (f"{socket.gethostname()}:{process.pid}:1", f"{socket.gethostname()}:{os.getpid()}:1"):
        assert not is_alive({PROCESS: other}), "it ended, or another process has its number"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell when a process started by ticks")
def test_a_clock_that_is_set_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux derives when a process started from the clock and the time since the boot."""
    before, boot = process_tags(), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 3600)
    assert is_alive(before)


@pytest.mark.parametrize("tags", [{}, {PROCESS: f"elsewhere:{os.getpid()}:1"}])
def test_processes_of_other_hosts_are_not_alive(tags: dict[str, str]) -> None:
    assert not is_of_this_host(tags)
    assert not is_alive(tags)


def test_a_copy_of_a_clone_is_another_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first := tmp_path / "first").mkdir()
    monkeypatch.setenv("DVC_ROOT", str(first))
    own = clone_id()
    assert clone_id() == own
    assert clone_tag({}) == clone_tag({"stage": "train", CLONE: own}) == {CLONE: own}
    shutil.copytree(first, copy := tmp_path / "copy")
    first.rename(moved := tmp_path / "moved")
    monkeypatch.setenv("DVC_ROOT", str(moved))
    assert clone_id() == own
    monkeypatch.setenv("DVC_ROOT", str(copy))
    assert clone_id() != own
    assert clone_tag({CLONE: own}) == clone_tag({"stage": "train"}) == {CLONE: SHARED}
