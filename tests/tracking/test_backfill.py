"""Which executions show that outputs were recorded for other inputs than made them."""

import copy
import functools
import operator
from typing import Any

import pytest
from factories import ROOT

from gradtrail.stages.common.params import PARAMS
from gradtrail.stages.common.pipeline_file import Entry
from gradtrail.stages.common.versions import VERSIONS
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.tracking.backfill import difference

DEPS = {
    "data/processed/train": "1",
    "pipeline/networks": "2",
    "pipeline/train.py": "3",
    "src/gradtrail/core/train": "4",
    "src/gradtrail/stages/report/sections/costs.html.j2": "5",
}
PARAMS_OF_TRAIN = {str(PARAMS): {"train": read_yaml(ROOT / PARAMS)["train"]}, str(VERSIONS): {"jax": "0.10.2"}}
MADE = Entry(cmd="", params=PARAMS_OF_TRAIN, deps=DEPS)

# Changed value of the record → words
CHANGES: dict[tuple[str, ...], str] = {
    ("deps", "data/processed/train"): "from another data/processed/train",
    ("deps", "pipeline/networks"): "from another pipeline/networks",
    ("deps", "pipeline/train.py"): "",
    ("deps", "src/gradtrail/core/train"): "",
    ("deps", "src/gradtrail/stages/report/sections/costs.html.j2"): "",
    ("deps", "data/new"): "",  # which came with other code
    ("params", str(VERSIONS), "jax"): "",
    ("params", str(PARAMS), "train", "epochs"): "with train.epochs 10, not 9",
    ("params", str(PARAMS), "train", "adamw", "learning_rate"): "with train.adamw.learning_rate 0.005, not 9",
    ("params", str(PARAMS), "train", "cnn", "kernel_size"): "",  # of a model that is not chosen
    ("params", str(PARAMS), "train", "of_other_code"): "",
}


def changed(*keys: str) -> Entry:
    entry: dict[str, Any] = {"deps": dict(MADE.deps), "params": copy.deepcopy(MADE.params)}
    functools.reduce(operator.getitem, keys[:-1], entry)[keys[-1]] = 9
    return Entry(cmd="", **entry)


@pytest.mark.parametrize("keys", CHANGES)
def test_only_other_inputs_contradict_a_record(keys: tuple[str, ...]) -> None:
    assert difference(changed(*keys), MADE) == CHANGES[keys]


def test_networks_and_the_params_of_a_training_that_has_a_run_may_be_left_out() -> None:
    assert difference(changed("deps", "pipeline/networks"), MADE, ignored=("pipeline/networks",)) == ""
    assert difference(changed("params", str(PARAMS), "train", "epochs"), MADE, prefix="train.") == ""
