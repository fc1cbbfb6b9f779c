"""Params of types that are not chosen are inactive."""

from factories import ROOT

from gradtrail.stages.common.active_params import active_params
from gradtrail.stages.common.overrides import flatten
from gradtrail.stages.common.params import read_yaml

TRAIN = flatten({"train": read_yaml(ROOT / "params.yaml")["train"]})


def blocks(**changes: str | bool) -> set[str]:
    active = active_params(TRAIN | {f"train.{key}": value for key, value in changes.items()})
    return {key.split(".")[1] for key in active if key.count(".") == 2}


def test_blocks_of_chosen_types_are_active() -> None:
    assert blocks(model="mlp", optimizer="adamw", schedule="cosine") == {"mlp", "adamw", "cosine", "augmentation"}
    assert blocks(model="cnn", optimizer="sgd", schedule="linear") == {"cnn", "sgd", "linear", "augmentation"}
    assert blocks(precision="float16") == blocks() | {"loss_scaling"}
    for enabled in (True, "True", "true"):
        assert blocks(**{"privacy.enabled": enabled}) == blocks() | {"privacy"}


def test_vary_is_active_with_several_members() -> None:
    assert "train.vary" not in active_params(TRAIN)
    assert "train.vary" not in active_params({key: str(value) for key, value in TRAIN.items()})
    for members in (2, "2"):
        assert "train.vary" in active_params(TRAIN | {"train.members": members})


def test_reduction_is_active_with_several_shards() -> None:
    assert "train.reduction" not in active_params(TRAIN)
    for shards in (2, "2"):
        assert "train.reduction" in active_params(TRAIN | {"train.shards": shards})


def test_linear_model_has_no_block_though_a_schedule_has_that_name() -> None:
    assert blocks(model="linear", optimizer="sgd", schedule="cosine") == {"sgd", "cosine", "augmentation"}


def test_params_outside_of_blocks_are_active() -> None:
    inactive = {"train.vary", "train.reduction"}
    assert {key for key in TRAIN if key.count(".") == 1} - inactive <= active_params(TRAIN).keys()
    assert active_params({"train.cnn.dropout": 1, "evaluate.weights": "best"}) == {
        "train.cnn.dropout": 1,
        "evaluate.weights": "best",
    }
