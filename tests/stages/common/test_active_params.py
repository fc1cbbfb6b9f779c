"""Params of types that are not chosen are inactive."""

import pytest
from factories import ROOT

from gradtrail.stages.common.params import active_params, flatten, read_yaml

TRAIN = flatten({"train": read_yaml(ROOT / "params.yaml")["train"]})


def blocks(**changes: str | bool) -> set[str]:
    active = active_params(TRAIN | {f"train.{key}": value for key, value in changes.items()})
    return {key.split(".")[1] for key in active if key.count(".") == 2}


def test_blocks_of_chosen_types_are_active() -> None:
    assert blocks(model="mlp", optimizer="adamw", schedule="cosine") == {"mlp", "adamw", "cosine", "augmentation"}
    assert blocks(model="cnn", optimizer="sgd", schedule="linear") == {"cnn", "sgd", "linear", "augmentation"}
    assert blocks(model="linear", optimizer="sgd", schedule="cosine") == {"sgd", "cosine", "augmentation"}
    assert blocks(precision="float16") == blocks() | {"loss_scaling"}
    for enabled in (True, "True", "true"):
        assert blocks(**{"privacy.enabled": enabled}) == blocks() | {"privacy"}


@pytest.mark.parametrize(("key", "number"), [("vary", "members"), ("reduction", "shards")])
def test_params_of_several_members_or_shards_are_active_with_two(key: str, number: str) -> None:
    assert f"train.{key}" not in active_params(TRAIN)
    assert f"train.{key}" not in active_params({name: str(value) for name, value in TRAIN.items()})
    for value in (2, "2"):
        assert f"train.{key}" in active_params(TRAIN | {f"train.{number}": value})


def test_params_outside_of_blocks_are_active() -> None:
    inactive = {"train.vary", "train.reduction"}
    assert {key for key in TRAIN if key.count(".") == 1} - inactive <= active_params(TRAIN).keys()
    assert active_params({"train.cnn.dropout": 1, "evaluate.weights": "best"}) == {
        "train.cnn.dropout": 1,
        "evaluate.weights": "best",
    }
