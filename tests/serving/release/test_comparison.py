"""A candidate compared with the champion: what counts as worse, and what cannot be compared."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from registered import evaluation, training
from releasing import RIGHT, champion, crown, judge

from gradtrail.serving.candidate import find_candidate
from gradtrail.serving.release.comparison import compare
from gradtrail.serving.release.rollback import rollback


def test_worse_model_is_refused_and_one_that_differs_by_chance_is_not(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    good, unlucky, bad = model(0, wrong=2), model(1, wrong=6, first=1), model(2, wrong=12, first=0)
    assert crown(good) == 0
    assert crown(unlucky) == 0  # 5 lost, 1 gained: p = 0.22
    assert rollback("") == 0
    capsys.readouterr()
    assert crown(bad) == 1  # 10 lost, none gained: p = 0.002
    output = capsys.readouterr().out
    assert "worse than the champion on the test split: -5.00 [-5.00, -1.92] points of accuracy" in output
    assert "p = 0.00195 (0 gained, 10 lost of 200)" in output
    assert champion() == "1"


def test_other_test_splits_are_not_compared(
    client: MlflowClient, exported: Callable[[int], Path], model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    assert crown(model(0)) == 0
    for seed, options in ((1, {"dataset_digest": "1" * 12}), (2, {"labels": RIGHT[::-1].copy()})):
        run = training(client, seed=seed, export=exported(seed))
        evaluation(client, run, options.get("labels", RIGHT), **options)
        judge(client, run, "pass")
        assert crown(run) == 1
        assert "the test splits differ" in capsys.readouterr().out
    run = training(client, seed=3, export=exported(3))
    judge(client, run, "pass")
    assert crown(run) == 1
    assert "the model has no predictions of the test split" in capsys.readouterr().out


def test_examples_are_joined_by_their_ids(client: MlflowClient, model: Callable[..., Run]):
    """The same predictions in another order are the same predictions."""
    first, second = (find_candidate(model(seed, wrong=seed + 4).info.run_id, client) for seed in (0, 1))
    expected = compare(first, second).examples
    order = np.random.default_rng(0).permutation(len(RIGHT))
    second.predictions.table.loc[:] = second.predictions.table.iloc[order].to_numpy()
    assert compare(first, second).examples == expected


@pytest.mark.parametrize(("seeds", "is_paired"), [((0, 1, 2), True), ((7, 8, 9), False)])
def test_members_are_compared_over_their_seeds(
    client: MlflowClient, model: Callable[..., Run], seeds: tuple[int, ...], is_paired: bool, tmp_path: Path
):
    runs = [model(seed) for seed in (0, 1)]
    for run, numbers, accuracies in zip(
        runs, (seeds, (0, 1, 2)), ((0.91, 0.92, 0.93), (0.96, 0.971, 0.977)), strict=True
    ):
        path = tmp_path / "members.csv"
        rows = "".join(f"{seed},{value}\n" for seed, value in zip(numbers, accuracies, strict=True))
        path.write_text(f"seed,accuracy\n{rows}")
        candidate = find_candidate(run.info.run_id, client)
        client.log_artifact(candidate.evaluation.info.run_id, str(path), "results")
    comparison = compare(*(find_candidate(run.info.run_id, client) for run in runs))
    assert comparison.is_paired == is_paired
    assert comparison.seeds.mean == pytest.approx(-0.148 / 3)
    assert not comparison.examples.is_worse
    assert any("over its seeds" in reason for reason in comparison.worse)
    assert crown(runs[1]) == 0
    assert crown(runs[0]) == 1
