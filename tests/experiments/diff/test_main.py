"""`gradtrail diff` on a real store: its runs and its page; timed comparisons leave nothing behind."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from projects import Project, finished_project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project on digits with a second attempt of its training, and another training with a larger batch."""
    project = finished_project().copy(tmp_path_factory.mktemp("diff") / "project")
    project.dvc("repro", "--force", "--single-item", "train")
    batch_size = int(re.search(r"  batch_size: (\d+)", (project.folder / "params.yaml").read_text())[1])  # type: ignore[index]
    project.set("train.batch_size", 2 * batch_size)
    project.dvc("repro", "--single-item", "train")
    return project


def refused(project: Project, *arguments: str) -> str:
    """Return the one line with which a comparison is refused."""
    line = project.gradtrail("diff", *arguments, status=2).strip()
    assert line.startswith("gradtrail: ")
    assert "\n" not in line
    return line


def test_larger_batch_is_named_for_every_word_for_a_run(project: Project) -> None:
    new, old = project.runs_of("train")[:2]
    for before in (old["id"], old["id"][:8], old["tags"]["state"]):
        output = project.gradtrail("diff", before, "workspace").splitlines()
        assert "train.batch_size " in output[0]
        assert output[1].startswith("A  ")
        assert any(line.strip().startswith("train_step") and "other program" in line for line in output)
    page = max((project.folder / "results/diff").glob("*.html")).read_text()
    assert "train.batch_size" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    result = json.loads(project.gradtrail("diff", old["id"], new["id"], "--json"))
    assert [one["run_id"] for one in result["runs"]] == [old["id"], new["id"]]
    assert result["params"].keys() == {"train.batch_size"}
    assert {"verdict", "before", "after"} <= result["functions"][0].keys()


def test_attempts_of_one_state_have_equal_programs_and_separate_times(project: Project) -> None:
    old = project.runs_of("train")[1]["id"]
    result = json.loads(project.gradtrail("diff", f"{old}@1", f"{old}@2", "--json"))
    assert {function["verdict"].partition(",")[0] for function in result["functions"]} == {"same program"}
    first, second = (one["seconds"] for one in result["runs"])
    assert first.keys() == second.keys() == {"imports", "data", "compile", "compute", "tracking"}
    assert first != second
    assert all(value >= 0 for value in (first | second).values())
    assert result["params"] == result["data"] == {}
    assert result["code"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["workspace", "workspase"], "workspase: no run has this name"),
        (["workspace", "HEAD~99"], "HEAD~99"),
        (["workspace", "workspace@9"], "workspace@9: the run has attempts 1 to"),
        (["--stage", "trian", "workspace", "workspace"], "trian"),
    ],
)
def test_bad_input_is_one_line(project: Project, arguments: list[str], words: str) -> None:
    assert words in refused(project, *arguments)


def test_runs_of_different_stages_are_refused(project: Project) -> None:
    evaluation = project.runs_of("evaluate")[0]["id"]
    assert "only runs of one stage can be compared" in refused(project, "workspace", evaluation)


def test_note_names_missing_artifacts_of_a_rebuilt_run(project: Project, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "copy")
    copy.empty_store()
    copy.sync()
    output = copy.gradtrail("diff", "workspace", "workspace")
    assert "was rebuilt from its outputs: it has no times, programs or environment" in output


@pytest.fixture
def timed_project(tmp_path: Path) -> Project:
    project = finished_project().copy(tmp_path / "project")
    project.gradtrail("runs")  # says that the store was moved
    return project


def left_behind(project: Project) -> list[str]:
    """Return what a comparison left: folders, and worktrees beside the repository itself."""
    folders = [path.name for path in (project.folder / ".gradtrail/timed").glob("*")]
    return folders + project.git("worktree", "list").strip().splitlines()[1:]


def test_timing_a_program_against_itself_leaves_no_worktree(timed_project: Project) -> None:
    before = timed_project.git("status", "--porcelain")
    result = json.loads(timed_project.gradtrail("diff", "workspace", "HEAD", "--time", "--seconds", "1", "--json"))
    timed = result["timed"]
    assert timed["low"] < timed["ratio"] < timed["high"]
    assert timed["num_processes"] == 3
    assert timed["num_bursts"] >= 3 * 30
    assert left_behind(timed_project) == []
    assert timed_project.git("status", "--porcelain") == before


def test_failed_timing_is_one_line_and_leaves_nothing(timed_project: Project, tmp_path: Path) -> None:
    bare = tmp_path / "bare" / "python"
    bare.parent.mkdir()
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'jax'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    for arguments, words in (
        (["--python-b", str(bare)], "No module named 'jax'"),
        (["--python-b", str(tmp_path)], "--python-b: no interpreter"),
        (["--stage", "evaluate"], "only trainings can be timed"),
    ):
        line = timed_project.gradtrail("diff", "workspace", "HEAD", "--time", *arguments, status=2).strip()
        assert line.startswith("gradtrail: "), line
        assert words in line
        assert "\n" not in line
    assert left_behind(timed_project) == []


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM])
def test_stopped_timing_leaves_nothing(timed_project: Project, number: signal.Signals) -> None:
    process = timed_project.start("gradtrail", "diff", "workspace", "HEAD", "--time", "--seconds", "600")
    ends = time.monotonic() + 120
    while not (timed_project.folder / ".gradtrail/timed").is_dir() or len(left_behind(timed_project)) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < ends
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert left_behind(timed_project) == []
