"""Training runs, read from the database: the same as MLflow's client returns."""

import math
from collections.abc import Iterator

import pytest
from mlflow import MlflowClient

from gradtrail.support.errors import UserError
from gradtrail.tracking import trainings
from gradtrail.tracking.relocate import EXPERIMENT
from gradtrail.tracking.store import experiment_id, open_store
from gradtrail.tracking.trainings import find_trainings

METRIC = "any metric/name: 1.5_"
VALUES = (0.1 + 0.2, 5.0, None, math.nan, -2.0, math.inf, 5.0, -math.inf, 0.0)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowClient]:
    """A client of a store with a training for each of VALUES, a deleted one, and runs that are no trainings."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.chdir(folder)
        client = open_store()
        models, data = experiment_id(client, "models"), experiment_id(client, "data")
        for number, value in enumerate((*VALUES, 7.0)):
            run = client.create_run(models, start_time=number // 2, tags={"stage": "train"}, run_name=f"'{number}'")
            client.log_param(run.info.run_id, "seed", number)
            if value is not None:
                client.log_metric(run.info.run_id, METRIC, -value, step=0)
                client.log_metric(run.info.run_id, METRIC, value, step=1)
            client.set_terminated(run.info.run_id, "KILLED" if number % 3 else "FINISHED")
        client.delete_run(run.info.run_id)
        client.create_run(models, tags={"stage": "evaluate"})
        client.create_run(data, tags={"stage": "train"})
        yield client


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("metric", [METRIC, "no metric"])
def test_database_and_client_have_the_same_runs_in_the_same_order(
    metric: str, limit: int | None, ascending: bool, client: MlflowClient
) -> None:
    expected = trainings._by_client(metric, ascending=ascending, limit=limit)
    assert len(expected) == (limit or len(VALUES))
    assert repr(find_trainings(metric, ascending=ascending, limit=limit)) == repr(expected)  # NaN equals itself there


def test_client_is_not_opened_for_a_database_with_trainings(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainings, "_by_client", None)
    assert len(find_trainings(METRIC, ascending=True, limit=None)) == len(VALUES)


def test_experiment_is_found_by_its_tag_and_a_deleted_one_is_refused(client: MlflowClient) -> None:
    experiment = client.get_experiment_by_name("models")
    assert experiment is not None
    assert experiment.tags[EXPERIMENT] == "models"
    client.rename_experiment(experiment.experiment_id, "renamed")
    try:
        assert len(find_trainings(METRIC, ascending=True, limit=None)) == len(VALUES)
    finally:
        client.rename_experiment(experiment.experiment_id, "models")
    client.delete_experiment(experiment.experiment_id)
    try:
        with pytest.raises(UserError, match="experiment 'models' was deleted; `mlflow experiments restore"):
            find_trainings(METRIC, ascending=True, limit=None)
    finally:
        client.restore_experiment(experiment.experiment_id)
