"""Comparisons change params that exist to values that are allowed, and queue no more than what is missing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT

from gradtrail.experiments.sections import section_configs
from gradtrail.experiments.sweep import spec
from gradtrail.experiments.sweep.main import compare
from gradtrail.experiments.sweep.spec import (
    PlannedRun,
    Training,
    params_of,
    read_comparisons,
    trainings_of,
)
from gradtrail.stages.common.params import read_yaml, validate
from gradtrail.support.errors import UserError

PARAMS = read_yaml(ROOT / "params.yaml")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_variants_of_the_repository_are_valid_and_distinct() -> None:
    configs = section_configs()
    for name, comparison in read_comparisons().items():
        variants = [params_of(Training(label, range(1)), comparison, PARAMS) for label in comparison.variants]
        for params in variants:
            for section, into in configs.items():
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
