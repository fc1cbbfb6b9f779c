"""The key of members: that of the training of these seeds, in as large a group, and of no other."""

import dataclasses

from factories import train_config

from gradtrail.core.train.config import TrainConfig
from gradtrail.stages.common.pipeline_file import StageSpec
from gradtrail.tracking.lineage.snapshots import Snapshot
from gradtrail.tracking.lineage.state import Identity

SPEC = StageSpec(cmd="train", deps=("code.py",), params={"params.yaml": ("train",)}, outs=("models",))


def training(config: TrainConfig) -> Identity:
    section = {name: getattr(config, name) for name in ("seed", "members", "members_at_once", "epochs")}
    params = {"params.yaml": {"train": section | {"vary": [*config.vary]}}}
    lock = {"train": {"cmd": "train", "params": params, "deps": [{"path": "code.py", "md5": "c"}]}}
    return Identity("train", from_lock=True, snapshot=Snapshot(pipeline={"train": SPEC}, lock=lock))


def keys(config: TrainConfig) -> list[str]:
    """Return the key of each group."""
    identity = training(config)
    seeds = [dataclasses.asdict(config.seeds_of(group[0])) for group in config.groups]
    group_seeds = [{name: seed for name, seed in member_seeds.items() if seed is not None} for member_seeds in seeds]
    return [identity.member_state(first, len(group)) for first, group in zip(group_seeds, config.groups, strict=True)]


def test_a_member_by_itself_has_the_key_of_the_training_of_its_seed() -> None:
    alone = [training(train_config(seed=seed)).state for seed in (3, 4, 5)]
    assert keys(train_config(seed=3, members=3)) == alone
    assert keys(train_config(seed=3, members=3, members_at_once=2))[1] == alone[2], "the last group is one network"


def test_a_group_has_the_key_of_the_training_of_these_members_alone() -> None:
    whole = training(train_config(seed=3, members=2, members_at_once=2)).state
    assert keys(train_config(seed=3, members=2, members_at_once=2)) == [whole]
    assert keys(train_config(seed=3, members=4, members_at_once=2))[0] == whole
    assert keys(train_config(seed=3, members=3, members_at_once=2))[0] == whole


def test_groups_of_other_seeds_sizes_or_params_have_other_keys() -> None:
    configs = [
        train_config(seed=0, members=4, members_at_once=2),
        train_config(seed=0, members=3, members_at_once=3),
        train_config(seed=0, members=4, members_at_once=4),
        train_config(seed=0, members=2, members_at_once=2, vary=("order",)),
        train_config(seed=0, members=2, members_at_once=2, epochs=3),
        train_config(seed=0, members=2),
    ]
    all_keys = [key for config in configs for key in keys(config)]
    assert len({*all_keys}) == len(all_keys) == 8
