"""Entries of `experiments.yaml` change params that exist to values that are allowed; mistakes are one line."""

from pathlib import Path
from typing import Any

import pytest
from factories import ROOT

from gradtrail.experiments.compare.main import require_valid
from gradtrail.experiments.compare.plan import trainings_of
from gradtrail.experiments.compare.spec import (
    Comparison,
    parse_params,
    read_entries,
    with_seeds,
)
from gradtrail.stages.common.params import MEMBERS, SEED
from gradtrail.support.errors import UserError

RATE = "train.adamw.learning_rate"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def read(content: dict[str, Any], folder: Path) -> Comparison:
    path = folder / "experiments.yaml"
    path.write_text(str({"mine": content}).replace("None", "null").replace("True", "true"))
    entry = read_entries(path)["mine"]
    assert isinstance(entry, Comparison)
    return entry


def test_entries_of_the_repository_are_valid_and_their_variants_distinct() -> None:
    for entry in read_entries().values():
        if isinstance(entry, Comparison):
            require_valid(trainings_of(entry, entry.runs, together=True), entry.name)
            changes = [*entry.variants.values()]
            assert all(one not in changes[:place] for place, one in enumerate(changes))
            assert len(changes) == 1 or len(entry.seeds) >= 3


def test_entry_of_one_variant_has_its_name_and_the_seed_of_the_params(tmp_path: Path) -> None:
    entry = read({"about": "a recipe", "set": {"train.epochs": 2}}, tmp_path)
    assert (entry.variants, entry.seeds, entry.baseline) == ({"mine": {"train.epochs": 2}}, (0,), None)


def test_set_changes_all_variants_and_a_variant_comes_first(tmp_path: Path) -> None:
    content = {"set": {"train.epochs": 2}, "variants": {"short": {}, "long": {"train.epochs": 9}}}
    entry = read(content, tmp_path)
    assert entry.variants == {"short": {"train.epochs": 2}, "long": {"train.epochs": 9}}
    assert entry.baseline == "short"


def test_grid_is_every_combination_labelled_by_what_differs(tmp_path: Path) -> None:
    entry = read({"grid": {RATE: [0.1, 0.2], "train.epochs": [1], "train.clip_norm": [1, 2], SEED: [4, 5]}}, tmp_path)
    assert entry.seeds == (4, 5)
    labels = [f"adamw.learning_rate={rate}, clip_norm={norm}" for rate in (0.1, 0.2) for norm in (1, 2)]
    assert [*entry.variants] == labels
    assert entry.variants[labels[2]] == {RATE: 0.2, "train.epochs": 1, "train.clip_norm": 1}


def test_params_of_the_command_line_are_a_grid_in_yaml() -> None:
    comparison = parse_params(["train.cnn.channels=[8,16],[32]", "train.clip_norm=null", f"{SEED}=0,2"])
    assert comparison.seeds == (0, 2)
    assert comparison.variants == {
        "cnn.channels=[8, 16]": {"train.cnn.channels": [8, 16], "train.clip_norm": None},
        "cnn.channels=[32]": {"train.cnn.channels": [32], "train.clip_norm": None},
    }
    assert [*parse_params(["train.epochs=1"]).variants] == ["epochs=1"]


def test_entry_of_a_search_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "experiments.yaml"
    path.write_text("rates: {search: optuna, trials: 25}\n")
    assert read_entries(path) == {"rates": {"search": "optuna", "trials": 25}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"seeds": [-1]}, r"mine\.seeds: must be distinct integers from 0"),
        ({"seeds": [0, 0]}, r"mine\.seeds: must be distinct integers from 0"),
        ({"grid": {SEED: [0, "b"]}}, r"mine\.seeds: must be distinct integers from 0 to .*; got 0, b$"),
        (
            {"variants": {"one": {}, "two": {"train.modle": 1}}},
            r"mine\.variants\.two: params\.yaml has no key 'train\.modle'",
        ),
        (
            {"variants": {"one": {SEED: 1}}},
            r"one: train\.seed must not differ: all variants use the same seeds",
        ),
        (
            {"variants": {"one": {"runtime.trace": True}}},
            r"one: runtime\.trace changes neither training nor",
        ),
        ({"variants": {"one": None}}, r"mine\.variants\.one: Input should be an object, got None"),
        ({"variants": {"one": {}}, "grid": {RATE: [1]}}, r"mine: has variants and a grid"),
        ({"grid": {RATE: []}}, r"mine\.grid: train\.adamw\.learning_rate has no values"),
        ({"set": {MEMBERS: 2}}, r"mine\.set: train\.members must not differ: all variants use"),
        ({"set": {"train.sed": 2}}, r"set: params\.yaml has no key 'train\.sed'; did you mean 'train\.seed'\?"),
        ({"abuot": ""}, r"mine\.abuot is not a known key"),
    ],
)
def test_invalid_entry_is_one_line_with_its_key(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(content, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["train.seed", "=1", "train.seed=[", "train.sed=1", "train.seed=a", "train.seed="])
def test_invalid_text_of_params_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^--params") as caught:
        parse_params([text])
    assert "\n" not in str(caught.value)


def test_invalid_value_is_refused_before_anything_runs() -> None:
    comparison = with_seeds(parse_params(["train.epochs=-1"]), [3])
    with pytest.raises(UserError, match=r"^params: epochs=-1, seed 3: train\.epochs"):
        require_valid(trainings_of(comparison, comparison.runs, together=True), comparison.name)
