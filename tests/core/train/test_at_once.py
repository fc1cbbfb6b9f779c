"""Networks that one program trains at once are, but for rounding, those that it trains by themselves."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from cases import cases
from factories import make_engine, random_split, train_config

from gradtrail.core.data.config import AugmentationConfig
from gradtrail.core.nn.models import MLPConfig
from gradtrail.core.train import loop
from gradtrail.core.train.at_once import chunks_of, keys_at_once, member_of, speedup
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.keys import keys_of

SPLIT = random_split(30)
SEEDS = (0, 3, 4)
MLP = MLPConfig(hidden=(5,), activation="tanh", dropout=0.3)
CONFIGS = {
    "dropout, clipping, average": train_config(mlp=MLP, average_decay=0.9, clip_norm=0.1, epochs=2),
    "cnn, augmentation": train_config(
        model="cnn", augmentation=AugmentationConfig(shift=1.0, rotation=5.0, scale=0.1, shear=0.0, cutout=2), epochs=2
    ),
    "schedule-free, parts": train_config(mlp=MLP, optimizer="schedule_free", accumulation_steps=2, epochs=2),
    "muon": train_config(mlp=MLP, optimizer="muon", epochs=2),
    "loss scaling": train_config(mlp=MLP, precision="float16", epochs=2),
}


def trained(
    config: TrainConfig, *, members: int = 1, seed: int = 0, steps_per_call: int = 100, every: int | None = None
) -> tuple[Any, Any]:
    """Return the parameters to evaluate, and the records of the last epoch, on the host."""
    engine, examples = make_engine(config, SPLIT, members=members, every=every)
    seeds = [MemberSeeds.from_one(each) for each in SEEDS]
    keys = keys_of(MemberSeeds.from_one(seed)) if members == 1 else keys_at_once(seeds[:members])
    *_, last = loop.train(engine, engine.init(keys), examples, steps_per_call=steps_per_call)
    return jax.device_get((engine.evaluation_params(last.state), last.records))


@pytest.mark.parametrize("name", cases(CONFIGS, fast=("dropout, clipping, average", "muon")))
def test_members_at_once_are_those_by_themselves_but_for_rounding(name: str) -> None:
    config = CONFIGS[name]
    params, records = trained(config, members=3)
    tolerance = {"rtol": 0.05, "atol": 0.01} if config.precision == "float16" else {"rtol": 2e-3, "atol": 2e-4}
    for number, seed in enumerate(SEEDS):
        own_params, own_records = trained(config, seed=seed)
        own = member_of(params, number)
        jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), own, own_params)
        mine = jax.tree.map(lambda leaf, number=number: leaf[:, number], records)
        np.testing.assert_array_equal(mine.rows.indices, own_records.rows.indices)
        np.testing.assert_allclose(mine.loss, own_records.loss, **tolerance)


def test_each_member_has_the_records_of_the_examples_that_are_followed() -> None:
    config = CONFIGS["muon"]
    _, of_all = trained(config, members=3)
    _, of_some = trained(config, members=3, every=4)
    for number in range(3):
        rows, some = (
            jax.tree.map(lambda leaf, number=number: leaf[:, number], each.rows) for each in (of_all, of_some)
        )
        place = np.argsort(rows.indices.ravel())[-len(SPLIT) :: 4]  # padding is first
        np.testing.assert_array_equal(some.indices, np.arange(len(place)))
        np.testing.assert_array_equal(some.correct, rows.correct.ravel()[place])
        np.testing.assert_allclose(some.probability, rows.probability.ravel()[place], rtol=1e-3)
    assert len(np.unique(of_some.rows.probability)) == of_some.rows.probability.size, "no member has another's"


def test_the_length_of_the_calls_changes_no_bit() -> None:
    config = CONFIGS["dropout, clipping, average"]
    one, other = (trained(config, members=3, steps_per_call=steps) for steps in (1, 100))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_chunk_is_taken_apart_by_members() -> None:
    config = CONFIGS["muon"]
    engine, examples = make_engine(config, SPLIT, members=3)
    keys = keys_at_once([config.seeds_of(seed) for seed in (0, 0, 0)])
    *_, last = loop.train(engine, engine.init(keys), examples, steps_per_call=100)
    parts = chunks_of(last, 3)
    assert [part.step for part in parts] == [last.step] * 3
    for number, part in enumerate(parts):
        np.testing.assert_array_equal(part.records.loss, np.asarray(last.records.loss)[:, number])
        np.testing.assert_array_equal(part.records.rows.indices, np.asarray(last.records.rows.indices)[:, number])


def test_the_speedup_is_that_of_the_clock() -> None:
    """A call of three at once takes two seconds, of one alone one: three in the time of two."""
    config = CONFIGS["muon"]
    together, examples = make_engine(config, SPLIT, members=3)
    alone, _ = make_engine(config, SPLIT)
    ends = itertools.cycle((2.0, 1.0))
    now = itertools.accumulate(next(ends) if number % 2 else 0.5 for number in itertools.count())
    seeds = [config.seeds_of(0)] * 3
    assert speedup(together, alone, examples, seeds, lambda: next(now)) == 1.5


def test_what_members_at_once_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="members_at_once must be 1 with patience 1, got 2"):
        train_config(members=2, members_at_once=2, patience=1)
    with pytest.raises(ValueError, match="members_at_once must be 1 with shards 2, got 3"):
        train_config(members=2, members_at_once=3, shards=2)
    assert train_config(members=1, members_at_once=3, patience=1).groups == [range(1)]


@pytest.mark.parametrize(
    ("members", "at_once", "expected"),
    [(5, 1, [[7], [8], [9], [10], [11]]), (5, 2, [[7, 8], [9, 10], [11]]), (3, 8, [[7, 8, 9]])],
)
def test_members_are_trained_group_by_group(members: int, at_once: int, expected: list[list[int]]) -> None:
    config = train_config(seed=7, members=members, members_at_once=at_once)
    assert [[*group] for group in config.groups] == expected
