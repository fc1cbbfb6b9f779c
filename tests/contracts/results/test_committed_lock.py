"""`gradtrail repro` says where the outs differ from those of the committed lock, and on what these were made."""

import json
from pathlib import Path

import pytest
from projects import Project
from ruamel.yaml import YAML

from gradtrail.experiments import committed
from gradtrail.support.errors import UserError
from gradtrail.tracking.lineage.environment import machine_key

MACHINES = Path("machines.yaml")


@pytest.fixture(autouse=True)
def working_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.slow
def test_the_machine_of_each_stage_is_recorded_where_its_outs_changed(project: Project) -> None:
    committed.record_machines()
    recorded = YAML().load(MACHINES)
    assert {name: found["machine"] for name, found in recorded.items()} == dict.fromkeys(
        ("fetch", "train", "evaluate", "gradients"), machine_key()
    )
    MACHINES.write_text(MACHINES.read_text().replace(machine_key(), "of-another-kind"))
    committed.record_machines()
    assert {found["machine"] for found in YAML().load(MACHINES).values()} == {"of-another-kind"}
    project.set("evaluate.calibration_bins", 7)
    project.dvc("repro", "evaluate")
    committed.record_machines()
    changed = {name: found["machine"] for name, found in YAML().load(MACHINES).items()}
    assert changed == {**dict.fromkeys(recorded, "of-another-kind"), "evaluate": machine_key()}


def test_where_no_run_says_the_machine_it_is_unknown_and_not_looked_for_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.empty_store()
    committed.record_machines()
    assert {found["machine"] for found in YAML().load(MACHINES).values()} == {"unknown"}
    monkeypatch.setattr(committed, "Identity", None)  # which every search needs
    committed.record_machines()
    project.commit("made somewhere")
    project.run("sh", "pipeline/stage.sh", "train", env={"OTHER_BYTES": "!"})
    project.dvc("commit", "-f", "train")
    assert "made on a machine that machines.yaml does not name; " in committed.describe_differences()[0]


@pytest.mark.slow
def test_other_bytes_than_the_committed_ones_are_told_with_what_their_metrics_mean(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed, "SPREAD", {("train", "length"): 0.5, ("evaluate", "length"): 0.5})
    committed.record_machines()
    MACHINES.write_text(MACHINES.read_text().replace(machine_key(), "of-another-kind"))
    project.commit("made elsewhere")
    assert committed.describe_differences() == []
    project.run("sh", "pipeline/stage.sh", "train", env={"OTHER_BYTES": "!"})
    metrics = json.loads(Path("metrics/train.json").read_text())
    Path("metrics/train.json").write_text(json.dumps(metrics | {"length": 8}))
    project.dvc("commit", "-f", "train")
    (first,) = committed.describe_differences()  # the spread over seeds is that of another data set
    monkeypatch.setattr(committed, "SPREAD_ON", metrics["dataset"])
    same, verdict, *lines = committed.describe_differences()
    made = "bytes differ from the committed dvc.lock, made on of-another-kind"
    assert first == same == f"{made}; this machine is {machine_key()}: train"
    assert verdict == "  metrics differ by more than 3 standard deviations over seeds: train length"
    assert lines == ["  train length 5 → 8 (+3; standard deviation over seeds 0.5)"]
    monkeypatch.setattr(committed, "SPREAD", {("train", "length"): 1.0})
    assert committed.describe_differences()[1] == "  metrics agree within 3 standard deviations over seeds"
    project.set("train.adamw.learning_rate", 0.5)
    project.dvc("repro")
    assert committed.describe_differences() == [], "other params give other bytes anywhere, below too"


def test_a_file_that_is_none_is_one_line() -> None:
    MACHINES.write_text("train: here\n")
    with pytest.raises(UserError, match=r"^machines\.yaml: expected"):
        committed.record_machines()
