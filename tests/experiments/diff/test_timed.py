"""`gradtrail diff A B --time` on real runs: one end to end, and what is refused; nothing stays behind."""

import json
import signal
import time
from pathlib import Path

import pytest
from projects import Project, finished_project

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = finished_project().copy(tmp_path / "project")
    project.gradtrail("runs")  # says that the store was moved
    return project


def left_behind(project: Project) -> list[str]:
    """Return what a comparison left: folders, and worktrees beside the repository itself."""
    folders = [path.name for path in (project.folder / ".gradtrail/timed").glob("*")]
    return folders + project.git("worktree", "list").strip().splitlines()[1:]


def test_timing_a_program_against_itself_leaves_no_worktree(project: Project) -> None:
    before = project.git("status", "--porcelain")
    result = json.loads(project.gradtrail("diff", "workspace", "HEAD", "--time", "--seconds", "1", "--json"))
    timed = result["timed"]
    assert timed["low"] < timed["ratio"] < timed["high"]
    assert timed["num_processes"] == 3
    assert timed["num_bursts"] >= 3 * 30
    assert left_behind(project) == []
    assert project.git("status", "--porcelain") == before


def test_failed_timing_is_one_line_and_leaves_nothing(project: Project, tmp_path: Path) -> None:
    bare = tmp_path / "bare" / "python"
    bare.parent.mkdir()
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'jax'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    for arguments, words in (
        (["--python-b", str(bare)], "No module named 'jax'"),
        (["--python-b", str(tmp_path)], "--python-b: no interpreter"),
        (["--stage", "evaluate"], "only trainings can be timed"),
    ):
        line = project.gradtrail("diff", "workspace", "HEAD", "--time", *arguments, status=2).strip()
        assert line.startswith("gradtrail: "), line
        assert words in line
        assert "\n" not in line
    assert left_behind(project) == []


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM])
def test_stopped_timing_leaves_nothing(project: Project, number: signal.Signals) -> None:
    process = project.start("gradtrail", "diff", "workspace", "HEAD", "--time", "--seconds", "600")
    ends = time.monotonic() + 120
    while not (project.folder / ".gradtrail/timed").is_dir() or len(left_behind(project)) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < ends
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert left_behind(project) == []
