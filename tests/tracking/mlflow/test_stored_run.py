"""What a run in the store is given of a stage's outs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from gradtrail.tracking.mlflow import stored_run


def test_the_curve_of_one_member_does_not_take_the_place_of_epsilon_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results" / "train"
    folder.mkdir(parents=True)
    (folder / "epochs.csv").touch()
    found = {"train/epsilon": {1: 0.5}, "train/loss": {1: 1.0}}
    monkeypatch.setattr(stored_run, "read_tables", lambda _: ())
    monkeypatch.setattr(stored_run, "curves", lambda *_: found)
    stage = SimpleNamespace(folder=tmp_path, name="train")
    assert stored_run._curves(stage, {"planned_steps": 6, "epsilon": 0.5}) == found  # type: ignore[arg-type]
    several = stored_run._curves(stage, {"planned_steps": 6, "epsilon": 0.9, "epsilon_each": 0.5})  # type: ignore[arg-type]
    assert several == {"train/epsilon_each": {1: 0.5}, "train/loss": {1: 1.0}}
