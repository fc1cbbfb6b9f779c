"""The key of a member: that of the training with its seeds alone, and of no other."""

import dataclasses

from factories import train_config

from gradtrail.core.train.config import TrainConfig
from gradtrail.stages.common.pipeline_file import StageSpec
from gradtrail.tracking.lineage.snapshots import Snapshot
from gradtrail.tracking.lineage.state import Identity

SPEC = StageSpec(cmd="train", deps=("code.py",), params={"params.yaml": ("train",)}, outs=("models",))


def training(config: TrainConfig) -> Identity:
    section = {name: getattr(config, name) for name in ("seed", "members", "epochs")}
    params = {"params.yaml": {"train": section | {"vary": [*config.vary]}}}
    lock = {"train": {"cmd": "train", "params": params, "deps": [{"path": "code.py", "md5": "c"}]}}
    return Identity("train", from_lock=True, snapshot=Snapshot(pipeline={"train": SPEC}, lock=lock))


def keys(config: TrainConfig) -> list[str]:
    """Return the key of each member."""
    seeds = [dataclasses.asdict(config.seeds_of(seed)) for seed in config.seeds]
    identity = training(config)
    return [
        identity.member_state({name: seed for name, seed in member.items() if seed is not None}) for member in seeds
    ]


def test_member_has_the_key_of_the_training_of_its_seed() -> None:
    alone = [training(train_config(seed=seed)).state for seed in (3, 4, 5)]
    assert keys(train_config(seed=3, members=3)) == alone


def test_members_of_other_seeds_or_params_have_other_keys() -> None:
    configs = [
        train_config(seed=0, members=3),
        train_config(seed=0, members=2, vary=("order",)),
        train_config(seed=0, members=2, epochs=3),
    ]
    keys_of_members = {key for config in configs for key in keys(config)}
    assert len(keys_of_members) == 3 + 1 + 2, "the first member that varies in its order alone is that of seed 0"
