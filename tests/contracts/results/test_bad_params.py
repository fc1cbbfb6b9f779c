"""Params that once passed, hung or changed results: refused in one line, or without any effect."""

import sys
from pathlib import Path

import pytest
from projects import Project, copy_project

from gradtrail import cli

OUTS = ("results/gradients", "results/metrics/gradients.json")


def repro(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run `gradtrail repro`; return the line that it ends with."""
    monkeypatch.setattr(sys, "argv", ["gradtrail", "repro"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_more_epochs_than_can_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = copy_project(tmp_path / "project")
    monkeypatch.chdir(project.folder)
    project.set("train.epochs", 99999999999999999999)
    assert repro(monkeypatch, capsys).startswith("gradtrail: params.yaml: train.epochs must be")
    assert not Path("dvc.lock").exists()
    assert not Path("data").exists()


def test_twenty_thousand_nested_brackets(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.folder)
    with Path("params.yaml").open("a") as params:
        params.write(f"deep: {'[' * 20_000}{']' * 20_000}\n")
    assert repro(monkeypatch, capsys).startswith("gradtrail: params.yaml: not readable as YAML")
