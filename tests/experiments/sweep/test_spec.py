"""Comparisons, recipes and sweeps change params that exist to values that are allowed; mistakes are one line."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT

from gradtrail.core.train.config import TrainConfig
from gradtrail.experiments.sections import SECTIONS
from gradtrail.experiments.sweep import recipes, spec
from gradtrail.experiments.sweep.grid import read_sweep
from gradtrail.experiments.sweep.main import compare
from gradtrail.experiments.sweep.recipes import Recipe
from gradtrail.experiments.sweep.spec import (
    PlannedRun,
    Training,
    params_of,
    read_comparisons,
    trainings_of,
)
from gradtrail.stages.common.params import MEMBERS, SEED, active_params, changed, flatten, read_yaml, validate
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.support.errors import UserError
from gradtrail.tracking.mlflow.tags import param_text

PARAMS = read_yaml(ROOT / "params.yaml")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_variants_of_the_repository_are_valid_and_distinct() -> None:
    for name, comparison in read_comparisons().items():
        variants = [params_of(Training(label, range(1)), comparison, PARAMS) for label in comparison.variants]
        for params in variants:
            for section, into in SECTIONS.items():
                validate(params[section], into, name)
        assert all(one not in variants[:place] for place, one in enumerate(variants))
        assert len(comparison.seeds) >= 3


def test_runs_are_queued_by_seed_with_variants_in_a_fixed_random_order() -> None:
    comparison = read_comparisons()["optimizers"]
    runs = spec.planned_runs(comparison, range(20))
    trainings = trainings_of(runs, together=False)
    ordered = [run for training in trainings for run in training.runs]
    assert [run.seed for run in ordered] == sorted(run.seed for run in runs)
    assert sorted(ordered) == sorted(runs)
    assert trainings == trainings_of(runs, together=False)
    firsts = {ordered[place].label for place in range(0, len(runs), len(comparison.variants))}
    assert len(firsts) > 3, "no variant is always the first"


def test_consecutive_seeds_of_a_variant_are_one_training() -> None:
    missing = [PlannedRun("a", seed) for seed in (4, 0, 1, 7, 2)] + [PlannedRun("b", 3)]
    trainings = trainings_of(missing, together=True)
    assert sorted(map(str, trainings)) == ["a, seed 4", "a, seed 7", "a, seeds 0 to 2", "b, seed 3"]
    assert sorted(run for training in trainings for run in training.runs) == sorted(missing)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": []}, r"mine\.seeds: must be distinct integers from 0"),
        ({"seeds": [0, 0]}, r"mine\.seeds: must be distinct integers from 0"),
        ({"variants": {"one": {}}}, r"mine\.variants: at least two"),
        ({"variants": {"one": {}, "two": {"train.modle": 1}}}, r"mine\.variants\.two\.train\.modle is not a key"),
        ({"variants": {"one": {}, "two": {"train.seed": 1}}}, r"two\.train\.seed: all variants use the same seeds"),
        ({"variants": {"one": {}, "two": {"runtime.trace": True}}}, r"two\.runtime\.trace changes neither training"),
        ({"variants": {"one": {}, "two": None}}, r"mine\.variants\.two: Input should be an object, got None"),
        ({"abuot": ""}, r"mine\.abuot is not a known key"),
    ],
)
def test_invalid_comparison_is_one_line_with_its_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = {"mine": {"about": "", "seeds": [0], "variants": {"one": {}, "two": {}}} | change}
    path = tmp_path / "experiments.yaml"
    path.write_text(str(content).replace("None", "null").replace("True", "true"))
    with pytest.raises(UserError, match=message) as fault:
        read_comparisons(path)
    assert "\n" not in str(fault.value)


def test_missing_git_repository_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("params.yaml", "experiments.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"need a git repository with a commit$"):
        compare("clipping", None, 1)


WANTED = {
    "fetch.dataset": "mnist",
    "preprocess.seed": "0",
    "train.seed": "0",
    "train.epochs": "10",
}


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


RATE = "train.adamw.learning_rate"


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def written(folder: Path, text: str) -> Path:
    path = folder / "rates.yaml"
    path.write_text(text)
    return path


def test_grid_is_every_combination_followed_by_the_points(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
about: which rate?
set: {{train.epochs: 1}}
grid: {{{RATE}: [1e-3, 3e-3], {SEED}: [4, 5]}}
points:
  - {{train.model: cnn}}
""",
    )
    comparison, planned = read_sweep(path)
    assert [str(run) for run in planned] == [
        "learning_rate=0.001, seed 4",
        "learning_rate=0.001, seed 5",
        "learning_rate=0.003, seed 4",
        "learning_rate=0.003, seed 5",
        "model=cnn, seed 0",
    ]
    assert comparison.variants == {
        "learning_rate=0.001": {"train.epochs": 1, RATE: 0.001},
        "learning_rate=0.003": {"train.epochs": 1, RATE: 0.003},
        "model=cnn": {"train.epochs": 1, "train.model": "cnn"},
    }
    assert comparison.timed, "each experiment trains one seed"


def test_keys_with_the_same_last_part_are_labelled_in_full(tmp_path: Path) -> None:
    one, other = "train.mlp.activation", "train.cnn.activation"
    text = f"""
points:
  - {{{one}: tanh}}
  - {{{other}: tanh, train.epochs: 2}}
  - {{train.epochs: 2}}
  - {{{one}: tanh, {SEED}: 1}}
"""
    comparison, planned = read_sweep(written(tmp_path, text))
    labels = [f"{one}=tanh", f"{other}=tanh, epochs=2", "epochs=2"]
    assert list(comparison.variants) == labels
    assert [str(run) for run in planned] == [*(f"{label}, seed 0" for label in labels), f"{labels[0]}, seed 1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about: nothing", r"no experiments; `grid` and `points` must have 1 to 10,000"),
        ("grid: {train.seed: []}", r"grid\.train\.seed: has no values"),
        ("grid: {train.sed: [1]}", r"grid\.train\.sed is not a key of params\.yaml; did you mean 'train\.seed'\?"),
        ("points: [{train.model: cnn}, {colour: red}]", r"points\.1\.colour is not a key of params\.yaml"),
        ("set: {train.seed: 1}\ngrid: {train.model: [cnn]}", r"set\.train\.seed: each experiment trains one seed"),
        (
            f"grid: {{{MEMBERS}: [1, 2]}}",
            r"grid\.train\.members: each experiment trains one seed; list seeds in `grid`",
        ),
        ("grid: {gradients.num_largest: [1]}", r"grid\.gradients\.num_largest changes neither training nor evaluation"),
        ("grid: {train.seed: [-1]}", r"train\.seed: must be distinct integers from 0 to"),
        ("grid: {train.seed: [0, b]}", r"train\.seed: must be distinct integers from 0 to .*; got b$"),
        ("points: [{train.seed: true}]", r"train\.seed: must be distinct integers from 0 to .*; got True$"),
        ("grids: {}", r"rates\.yaml\.grids is not a known key$"),
        (
            "grid: {train.seed: [%s], train.epochs: [%s]}" % ((", ".join(map(str, range(1, 150))),) * 2),
            r"more than 10,000 experiments",
        ),
    ],
)
def test_invalid_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_sweep(written(tmp_path, text))
    assert "\n" not in str(caught.value)
