"""Trainings that differ only in the seed have a parent that shows their means and the intervals of these."""

import json
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from model_store import enter_store
from PIL import Image

from gradtrail.experiments.list_runs import print_runs
from gradtrail.support.errors import UserError
from gradtrail.tracking import gc, variants
from gradtrail.tracking.backfill import States
from gradtrail.tracking.dvc_history import RecordedStates
from gradtrail.tracking.find_run import look_up
from gradtrail.tracking.runs import RunIndex
from gradtrail.tracking.state import Snapshot
from gradtrail.tracking.store import experiment_id, open_store
from gradtrail.tracking.tags import NOTE, OUTS, PARENT, TRAININGS, VARIANT, clone_tag
from gradtrail.tracking.variants import FIGURE, Variant, update_parent, update_parents

NAME = "a" * 64
CURVES = {  # seed → validation accuracy by epoch
    0: [0.5, 0.75, 0.875, 0.9375],
    1: [0.25, 0.75, 0.75, 0.875],
    2: [0.5, 0.625, 0.9375, 0.96875, 0.5],  # it stopped later
}


@pytest.fixture
def client(created_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """An empty store."""
    return enter_store(created_store, tmp_path / "store", monkeypatch)


def training(client: MlflowClient, seed: int, *, weights: str = "w", began: int = 0, **changes: Any) -> str:
    """Log a training, finished unless `outs` is empty; return its id."""
    tags = {"stage": "train", "state": f"{seed:064x}", VARIANT: NAME, "dataset": "digits"}
    tags |= {OUTS: json.dumps({"models/final.safetensors": f"{weights}{seed}"})} | changes.get("tags", {})
    tags |= clone_tag({})
    name = f"mlp adamw digits · epochs=4 · seed {seed}"
    began = 1_000 * (seed + 1) + began
    run_id = str(client.create_run(experiment_id(client, "models"), began, tags, name).info.run_id)
    params = {"train.seed": str(seed), "train.epochs": "4", "only": str(seed)} | changes.get("params", {})
    curves = {"train/validation_accuracy": CURVES[seed], "train/validation_loss": [2.0 - x for x in CURVES[seed]]}
    points = [Metric(key, value, 1, step) for key, curve in curves.items() for step, value in enumerate(curve)]
    client.log_batch(run_id, points, [Param(*pair) for pair in params.items()])
    client.set_terminated(run_id, changes.get("status", "FINISHED"), began + 500)
    return run_id


def evaluate(client: MlflowClient, run_id: str, accuracy: float) -> None:
    """Log what an evaluation copies to its training."""
    values = {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - 0.01, "eval/accuracy_high": accuracy + 0.01}
    for key, value in (values | {"profile/train_step_flops": 7.0, "train/seconds": 1.0}).items():
        client.log_metric(run_id, key, value)


def parents(client: MlflowClient) -> list[Run]:
    return list(client.search_runs([experiment_id(client, "models")], f"tags.`{TRAININGS}` != ''"))


def contents(client: MlflowClient) -> dict[str, Any]:
    """Return all that the store has."""
    runs = client.search_runs([experiment_id(client, "models")], run_view_type=3)
    return {run.info.run_id: (run.to_dictionary(), histories(client, run)) for run in runs}


def histories(client: MlflowClient, run: Run) -> dict[str, list[tuple[int, float]]]:
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def interval(values: list[float], highest: float) -> Mapping[str, float]:
    """Return mean and 95 % interval as SciPy computes them, within the range of the metric."""
    low, high = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95) if np.std(values) else values[:2]
    return {"": float(np.mean(values)), "_low": max(low, 0.0), "_high": min(high, highest)}


def assert_is_parent_of(client: MlflowClient, seeds: list[int], run_ids: list[str]) -> Run:
    (parent,) = parents(client)
    assert all(client.get_run(run_id).data.tags[PARENT] == parent.info.run_id for run_id in run_ids)
    points, epochs = histories(client, parent), min(len(CURVES[seed]) for seed in seeds)
    for name, highest in (("accuracy", 1.0), ("loss", math.inf)):
        for epoch in range(epochs):
            values = [CURVES[seed][epoch] for seed in seeds]
            expected = interval(values if name == "accuracy" else [2.0 - value for value in values], highest)
            for end, value in expected.items():
                curve = points[f"train/validation_{name}{end}"]
                assert [step for step, _ in curve] == [*range(epochs)], "one point for each epoch that all have"
                assert curve[epoch][1] == pytest.approx(value, rel=1e-3), (name, epoch, end)
    return parent


def test_parent_shows_mean_and_interval_over_the_seeds(client: MlflowClient) -> None:
    run_ids = [training(client, seed) for seed in CURVES]
    for run_id, accuracy in zip(run_ids, (0.9, 0.92, 0.97), strict=True):
        evaluate(client, run_id, accuracy)
    update_parent(client, NAME)
    parent = assert_is_parent_of(client, [*CURVES], run_ids)
    assert parent.info.status == "FINISHED"
    assert parent.info.run_name == "mlp adamw digits · epochs=4 · 3 seeds"
    assert parent.data.params == {"train.epochs": "4"}
    assert not {"stage", "state"} & parent.data.tags.keys()
    others = {name: value for name, value in parent.data.metrics.items() if not name.startswith("train/")}
    expected = {f"eval/accuracy{end}": value for end, value in interval([0.9, 0.92, 0.97], 1.0).items()}
    assert others == pytest.approx(expected, rel=1e-3), "neither intervals of single trainings nor costs"
    note = parent.data.tags[NOTE]
    assert note.startswith("**Mean test accuracy 93.00%, 95 % interval 84.04% to 100.00%.**\n")
    assert "3 trainings that differ only in the seed: 0, 1, 2." in note
    assert f"get-artifact?path={FIGURE}&run_uuid={parent.info.run_id}" in note
    with Image.open(client.download_artifacts(parent.info.run_id, FIGURE)) as figure:
        assert figure.width < 700, "MLflow's UI does not scale figures"


def test_newest_training_of_a_seed_counts_and_the_parent_follows_later_evaluations(client: MlflowClient) -> None:
    older = training(client, 0, weights="of another machine", began=-500)
    client.log_metric(older, "train/validation_accuracy", 0.0, step=0, timestamp=2)
    run_ids = [older, training(client, 0), training(client, 1)]
    update_parent(client, NAME)
    first = assert_is_parent_of(client, [0, 1], run_ids)
    client.update_run(run_ids[1], status="RUNNING")  # it is executed again
    for run_id, accuracy in zip(run_ids[1:], (0.9, 0.8), strict=True):
        assert "eval/accuracy" not in parents(client)[0].data.metrics
        evaluate(client, run_id, accuracy)
        update_parent(client, NAME)
    (parent,) = parents(client)
    assert parent.info.run_id == first.info.run_id
    assert parent.data.metrics["eval/accuracy"] == 0.85


def test_nothing_changes_if_it_is_up_to_date(client: MlflowClient) -> None:
    for seed in CURVES:
        evaluate(client, training(client, seed), 0.9 + seed / 100)
    update_parents(client, RunIndex(client).runs())
    before = contents(client)
    update_parents(client, RunIndex(client).runs())
    update_parent(client, NAME)
    assert contents(client) == before


def test_other_trainings_lead_to_another_parent_and_fewer_than_two_to_none(client: MlflowClient) -> None:
    run_ids = [training(client, seed) for seed in (0, 1)]
    update_parent(client, NAME)
    assert_is_parent_of(client, [0, 1], run_ids)
    run_ids.append(training(client, 2))
    update_parent(client, NAME)
    assert_is_parent_of(client, [0, 1, 2], run_ids)
    client.delete_run(run_ids.pop(0))
    update_parents(client, RunIndex(client).runs())
    assert_is_parent_of(client, [1, 2], run_ids)
    client.delete_run(run_ids.pop(0))
    update_parents(client, RunIndex(client).runs())
    assert not parents(client)
    assert PARENT not in client.get_run(run_ids[0]).data.tags


def test_parent_that_a_person_deleted_stays_deleted_until_there_are_other_trainings(client: MlflowClient) -> None:
    run_ids = [training(client, seed) for seed in (0, 1)]
    update_parent(client, NAME)
    client.delete_run(parents(client)[0].info.run_id)
    update_parents(client, RunIndex(client).runs())
    assert not parents(client)
    assert PARENT not in client.get_run(run_ids[0]).data.tags
    run_ids.append(training(client, 2))
    update_parent(client, NAME)
    assert_is_parent_of(client, [0, 1, 2], run_ids)
    client.delete_run(run_ids.pop())
    update_parent(client, NAME)
    assert not parents(client)


@pytest.mark.parametrize(
    "changes",
    [
        {"tags": {VARIANT: "b" * 64}},
        {"tags": {"stage": "other"}},
        {"tags": {OUTS: "{}"}, "status": "FAILED"},
        {"params": {"train.members": "5"}},
        {"params": {"train.seed": "0"}},
    ],
    ids=["other variant", "other stage", "unfinished", "members", "same seed"],
)
def test_training_has_no_parent_without_another_seed(client: MlflowClient, changes: dict[str, Any]) -> None:
    training(client, 0)
    training(client, 1, **changes)
    before = contents(client)
    update_parents(client, RunIndex(client).runs())
    update_parent(client, NAME)
    assert contents(client) == before


def test_parent_whose_process_was_killed_is_made_again(client: MlflowClient) -> None:
    run_ids = [training(client, seed) for seed in (0, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "log_artifact", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            update_parent(client, NAME)
    (half,) = parents(client)
    assert half.info.status == "RUNNING"
    update_parent(client, NAME)
    assert len(parents(client)) == 2, "its process may be at work"
    client.set_terminated(half.info.run_id, "KILLED")  # as a sync does
    update_parent(client, NAME)
    assert_is_parent_of(client, [0, 1], run_ids)


def test_two_clones_make_one_parent(client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ids = [training(client, seed) for seed in (0, 1)]
    create = variants._create

    def slowly(*args: Any) -> Run:
        time.sleep(0.5)
        return create(*args)

    monkeypatch.setattr(variants, "_create", slowly)
    clones = [threading.Thread(target=update_parent, args=(open_store(), NAME)) for _ in range(3)]
    for clone in clones:
        clone.start()
    for clone in clones:
        clone.join()
    assert_is_parent_of(client, [0, 1], run_ids)
    assert len(contents(client)) == 3, "none was deleted"


def test_of_parents_that_two_clones_on_a_server_made_at_once_one_stays(client: MlflowClient) -> None:
    run_ids = [training(client, seed) for seed in (0, 1)]
    for _ in range(2):
        variants._create(client, NAME, Variant(RunIndex(client).runs()))
    update_parents(client, RunIndex(client).runs())
    assert_is_parent_of(client, [0, 1], run_ids)


def test_no_query_takes_the_parent_for_the_run_of_a_state(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ids = [training(client, seed) for seed in (0, 1)]
    update_parent(client, NAME)
    (parent,) = parents(client)
    index = RunIndex(client)
    for name in (parent.info.run_id, parent.info.run_name):
        with pytest.raises(UserError, match="no run has this name"):
            look_up(name, index.runs())
    monkeypatch.setattr(gc, "consistent_stages", lambda _: [])
    recorded = RecordedStates(snapshots=[Snapshot(pipeline={}, lock={})], num_unreadable=0)
    unneeded = [run.info.run_id for run in gc.unneeded_runs(client, recorded)]
    assert sorted(unneeded) == sorted(run_ids)
    States(client).remove_duplicates()
    print_runs(sort_by="train/validation_accuracy", ascending=False, where={}, limit=50)
    assert "2 training runs" in capsys.readouterr().out
    assert_is_parent_of(client, [0, 1], run_ids)
