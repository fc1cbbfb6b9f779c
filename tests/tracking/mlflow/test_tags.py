"""Whose a row is, and whether that process is still there."""

import os
import socket
import subprocess
import sys

import pytest

from gradtrail.tracking.mlflow import tags as row_labels
from gradtrail.tracking.mlflow.tags import is_alive, is_of_this_host, process_tags, working_diff


def test_this_process_is_alive() -> None:
    assert is_of_this_host(process_tags())
    assert is_alive(process_tags())


def test_a_process_that_ended_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert not is_alive({"process": f"{socket.gethostname()}:{process.pid}"})


def test_another_process_with_the_number_of_an_ended_one_is_not_it() -> None:
    assert not is_alive(process_tags() | {"process.started": "1"})


@pytest.mark.parametrize("tags", [{}, {"process": "elsewhere:1"}, {"process": f"elsewhere:{os.getpid()}"}])
def test_of_other_hosts_nothing_is_known(tags: dict[str, str]) -> None:
    assert not is_of_this_host(tags)
    assert not is_alive(tags)


def test_a_diff_has_at_most_a_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_labels, "git", lambda *_: "?? new.py\n M old.py")
    monkeypatch.setattr(row_labels, "git_bytes", lambda *_: b"+x\n")
    assert working_diff() == "# not in git: new.py\n+x\n"
    monkeypatch.setattr(row_labels, "git_bytes", lambda *_: "ä".encode() * 2**20)
    cut = working_diff()
    assert len(cut.encode()) <= 2**20
    assert cut.endswith("# cut off here\n")
