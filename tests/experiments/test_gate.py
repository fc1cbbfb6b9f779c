"""`gradtrail gate` says what changed, and accepts it when asked."""

import json
from pathlib import Path

import pytest
from projects import Project, copy_project

from gradtrail.experiments import cost_gate
from gradtrail.support.errors import UserError

COST = dict.fromkeys(cost_gate.TOLERANCES, 100)
MACHINE = {"jax": "1", "jaxlib": "1", "platform": "cpu", "processor": "x"}


def record(**changes: object) -> cost_gate.Record:
    return cost_gate.Record(
        **{"machine": MACHINE, "params": {"train": {"epochs": 1}}, "costs": {"train/step": COST}, **changes}
    )


@pytest.fixture
def accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cost_gate, "ACCEPTED", tmp_path / "accepted.json")
    monkeypatch.setattr(cost_gate, "measure", record)
    assert cost_gate.run_gate(accept=True) == 0
    return tmp_path / "accepted.json"


def test_what_was_accepted_passes(accepted: Path) -> None:
    assert cost_gate.run_gate(accept=False) == 0
    assert json.loads(accepted.read_text())["costs"] == {"train/step": COST}


def test_a_change_fails_with_before_and_after(
    accepted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = record(costs={"train/step": {**COST, "flops": 200}}, params={"train": {"epochs": 2}})
    monkeypatch.setattr(cost_gate, "measure", lambda: found)
    assert cost_gate.run_gate(accept=False) == 1
    told = capsys.readouterr().out
    assert all(word in told for word in ("train/step", "flops", "100", "200", "2.000", "gradtrail gate --accept"))
    assert "other params than those that were accepted: train.epochs" in told
    assert cost_gate.run_gate(accept=True) == 0
    assert cost_gate.run_gate(accept=False) == 0


@pytest.mark.parametrize(("changed", "compared"), [("processor", True), ("jax", False)])
def test_elsewhere_it_says_what_it_compares(
    changed: str, compared: bool, accepted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = record(machine={**MACHINE, changed: "2"}, costs={"train/step": {**COST, "flops": 1, "jaxpr_equations": 7}})
    monkeypatch.setattr(cost_gate, "measure", lambda: found)
    assert cost_gate.run_gate(accept=False) == int(compared)
    assert "comparing only argument_bytes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("content", [None, "", "{}", "[]"])
def test_without_a_record_it_is_one_line(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "accepted.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"accepted\.json: no "):
        cost_gate.read_record(path)


@pytest.mark.slow
def test_the_accepted_costs_are_those_of_the_repository(tmp_path: Path) -> None:
    """In a process of its own, as `make gate` does it; and a planted change of the params is found."""
    project: Project = copy_project(tmp_path / "project")
    (project.folder / "benchmarks").mkdir()
    root = Path(__file__).resolve().parents[2]
    (project.folder / cost_gate.ACCEPTED).write_bytes((root / cost_gate.ACCEPTED).read_bytes())
    env = {"PYTHONPATH": str(project.folder / "src")}
    assert "cost what was accepted" in project.run("python", "-m", "gradtrail", "gate", env=env)
    project.set("train.mlp.hidden", [512, 128])
    told = project.run("python", "-m", "gradtrail", "gate", env=env, check=False)
    assert "train.mlp.hidden" in told
    assert "train/train_step" in told
