"""Recipes change params that exist to values that are allowed; their results are found by params, not by names."""

from typing import Any

import pytest
from factories import ROOT

from gradtrail.core.train.config import TrainConfig
from gradtrail.experiments.sweep import recipes
from gradtrail.experiments.sweep.recipes import Recipe
from gradtrail.stages.common.active_params import active_params
from gradtrail.stages.common.overrides import changed, flatten
from gradtrail.stages.common.params import read_yaml, validate
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.tracking.mlflow.tags import param_text

PARAMS = read_yaml(ROOT / "params.yaml")
WANTED = {
    "fetch.dataset": "mnist",
    "preprocess.seed": "0",
    "train.seed": "0",
    "train.epochs": "10",
}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_recipes_of_the_repository_are_valid_trainings() -> None:
    for name, recipe in recipes.read_recipes().items():
        validate(changed(PARAMS, recipe.set)["train"], TrainConfig, name)


def test_command_of_a_recipe_can_be_typed() -> None:
    recipe = Recipe(about="", set={"train.model": "cnn", "train.clip_norm": None, "train.cnn.channels": [8, 16]})
    line = " ".join(recipes.command(recipe, range(3, 5)))
    changes = (
        "-S train.model=cnn -S train.clip_norm=null -S train.cnn.channels=[8,16] -S train.seed=3 -S train.members=2"
    )
    assert line == f"dvc exp run --temp {changes} evaluate"


def run(accuracy: float, **params: str) -> tuple[dict[str, str], dict[str, float]]:
    """A training as MLflow has it; `train_seed` stands for `train.seed`."""
    changed = {key.replace("_", ".", 1): value for key, value in params.items()}
    return WANTED | changed, {"eval/accuracy": accuracy, "train/num_parameters": 7.0, "train/seconds": 2.0}


def test_results_are_the_newest_run_per_seed_with_equal_params() -> None:
    runs = [run(0.9, train_seed="1"), run(0.8), run(0.1), run(0.2, train_epochs="20"), run(0.3, fetch_dataset="digits")]
    incomplete = ({"train.seed": "4"}, {"eval/accuracy": 0.4})
    result = recipes.summarize("mlp", "", WANTED, [*runs, incomplete])
    assert (result.seeds, result.accuracies, result.num_parameters) == ((0, 1), (0.8, 0.9), 7)


def test_params_of_a_run_are_those_that_dvc_locked() -> None:
    """By `dvc.lock`, which DVC wrote."""
    locked = read_yaml(ROOT / "dvc.lock")["stages"]
    read: dict[str, Any] = {}
    for name in ("fetch", "preprocess", "train"):
        read |= locked[name]["params"]["params.yaml"]
    expected = active_params({key: param_text(value) for key, value in flatten(read).items()})
    assert recipes.params_of_run(Recipe(about="", set={}), PARAMS, read_pipeline()) == expected
