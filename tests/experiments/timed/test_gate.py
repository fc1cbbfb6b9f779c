"""`gradtrail gate --timed`: what is too slow, and against which commit."""

import json
from pathlib import Path

import pytest
from projects import Project, copy_project

from gradtrail.experiments.timed import gate
from gradtrail.experiments.timed.ratio import LEVEL, Ratio
from gradtrail.support.errors import UserError


def ratio(low: float, high: float) -> Ratio:
    middle = (low * high) ** 0.5
    return Ratio(ratio=middle, low=low, high=high, level=LEVEL, num_processes=8, num_bursts=240, seconds=60.0)


@pytest.mark.parametrize(
    ("low", "high", "is_slow"), [(0.99, 1.01, False), (1.005, 1.03, False), (1.03, 1.06, True), (0.9, 1.3, False)]
)
def test_only_an_interval_above_the_tolerance_fails(low: float, high: float, is_slow: bool) -> None:
    assert gate.is_too_slow(ratio(low, high)) == is_slow


def test_missing_commit_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"accepted\.json: is in no commit"):
        gate.run_timed_gate(Path("accepted.json"), seconds=1.0)


@pytest.mark.nightly
def test_slower_training_in_the_working_folder_fails(tmp_path: Path) -> None:
    project: Project = copy_project(tmp_path / "project")
    project.set("train.mlp.hidden", [32])
    accepted = project.folder / "benchmarks/accepted_costs.json"
    accepted.parent.mkdir()
    accepted.write_text(json.dumps({"machine": {}, "params": {}, "costs": {}}))
    project.commit("costs accepted")
    project.set("train.mlp.hidden", [2048, 1024])
    code = (
        "import sys; from pathlib import Path; from gradtrail.experiments.timed.gate import run_timed_gate; "
        "sys.exit(run_timed_gate(Path('benchmarks/accepted_costs.json'), seconds=1.0))"
    )
    output = project.python("-c", code, status=1)
    assert "slower by more than 2%, over the whole interval" in output
    assert len(project.git("worktree", "list").strip().splitlines()) == 1
