"""Params of kinds that are not chosen are left out; a param that is left out changes no result."""

from factories import ROOT

from gradtrail.stages.common.active_params import active_params
from gradtrail.stages.common.overrides import flatten
from gradtrail.stages.common.params import read_yaml

TRAIN = flatten({"train": read_yaml(ROOT / "params.yaml")["train"]})


def blocks(**changes: str | bool) -> set[str]:
    found = active_params(TRAIN | {f"train.{key}": value for key, value in changes.items()})
    return {key.split(".")[1] for key in found if key.count(".") == 2}


def test_the_blocks_of_the_chosen_kinds_are_in_force() -> None:
    assert blocks(model="mlp", optimizer="adamw", schedule="cosine") == {"mlp", "adamw", "cosine", "augmentation"}
    assert blocks(model="cnn", optimizer="sgd", schedule="linear") == {"cnn", "sgd", "linear", "augmentation"}
    assert blocks(precision="float16") == blocks() | {"loss_scaling"}
    for enabled in (True, "True", "true"):
        assert blocks(**{"privacy.enabled": enabled}) == blocks() | {"privacy"}


def test_what_members_vary_in_counts_where_there_are_several() -> None:
    of_several = {"train.vary", "train.members_at_once"}
    assert not of_several & active_params(TRAIN).keys()
    assert not of_several & active_params({key: str(value) for key, value in TRAIN.items()}).keys()
    for members in (2, "2"):
        assert of_several <= active_params(TRAIN | {"train.members": members}).keys()


def test_how_sums_are_added_up_counts_where_there_are_several_shards() -> None:
    assert "train.reduction" not in active_params(TRAIN)
    for shards in (2, "2"):
        assert "train.reduction" in active_params(TRAIN | {"train.shards": shards})


def test_the_linear_model_has_no_block_though_a_schedule_has_that_name() -> None:
    assert blocks(model="linear", optimizer="sgd", schedule="cosine") == {"sgd", "cosine", "augmentation"}


def test_what_belongs_to_no_block_is_in_force_and_all_is_where_no_model_is_chosen() -> None:
    of_several = {"train.vary", "train.members_at_once", "train.reduction"}
    assert {key for key in TRAIN if key.count(".") == 1} - of_several <= active_params(TRAIN).keys()
    assert active_params({"train.cnn.dropout": 1, "evaluate.weights": "best"}) == {
        "train.cnn.dropout": 1,
        "evaluate.weights": "best",
    }
