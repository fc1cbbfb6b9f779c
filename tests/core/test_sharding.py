"""Eight devices train as one does: the same figures, each with its share of the work and the whole of the state."""

import json
from typing import Any

import jax
import pytest
from factories import NUM_CLASSES, SHAPE, run_on_devices, train_config

from gradtrail.core.config import ConfigError
from gradtrail.core.nn.models import Model
from gradtrail.core.train.loop import TrainingFunctions

pytestmark = pytest.mark.slow

TRAIN = """
import dataclasses, functools, json

import jax
import numpy as np
from factories import NUM_CLASSES, SHAPE, new_compiler, private_config, random_split, seed_keys, train_config

from gradtrail.core.sharding import data_parallel, make_mesh, over_batch, put
from gradtrail.core.train.augmentation import NO_AUGMENTATION
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import TrainingFunctions, on_device

SPLIT = random_split(40)  # in batches of 16: the last one holds 8, so that some devices have padding alone
CONFIGS = {
    "mlp": train_config(batch_size=16),
    "cnn in bfloat16": train_config(batch_size=16, model="cnn", precision="bfloat16", average_decay=0.9),
    "noisy mlp in float16": train_config(
        batch_size=16,
        precision="float16",
        model=MLP(hidden=(5,), activation="relu", dropout=0.5),
        augmentation=dataclasses.replace(NO_AUGMENTATION, cutout=2, crop=1, mixup=1.0),
    ),
    "adam in parts, by the fastest sums": train_config(
        batch_size=16, optimizer="adam", accumulation_steps=2, reduction="fastest"
    ),
}


def trained(config):
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    engine = TrainingFunctions(config, model, len(SPLIT), jax.devices()).compile(new_compiler())
    examples = on_device(SPLIT.images, SPLIT.labels, engine.mesh)
    initial = jax.device_get(engine.init(seed_keys(0)).params)
    *_, chunk = engine.train(engine.init(seed_keys(0)), examples, steps_per_call=2)
    evaluated = chunk.state.evaluation_params
    arrays = jax.tree.leaves((chunk.state, chunk.records, evaluated, examples))
    return {
        "initial": initial,
        "params": jax.device_get(chunk.state.params),
        "evaluated": jax.device_get(evaluated),
        "records": records_of(chunk),
        "devices": sorted({len(array.sharding.device_set) for array in arrays}),
        "replicas_differ": max(map(replicas_differ, arrays)),
        "flops": engine.run_steps.cost.flops,
    }


def records_of(chunk):
    # All but the norm of the parts: each device has its own.
    records = dataclasses.asdict(jax.device_get(chunk.records))
    records["metrics"].pop("part_grad_norm", None)
    return records


def replicas_differ(array):
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return len({np.asarray(shard.data).tobytes() for shard in array.addressable_shards}) > 1


def difference(left, right):
    differences = jax.tree.map(lambda a, b: np.max(np.abs(np.float64(a) - np.float64(b))), left, right)
    return float(max(jax.tree.leaves(differences)))


def compared(config):
    one, eight = (trained(dataclasses.replace(config, shards=shards)) for shards in (1, 8))
    return {
        "differences": {key: difference(one[key], eight[key]) for key in ("params", "evaluated", "records")},
        "moved": difference(one["params"], one["initial"]),
        "devices": [one["devices"], eight["devices"]],
        "replicas_differ": eight["replicas_differ"],
        "share_of_flops": eight["flops"] / one["flops"],
    }


def private(shards):
    # A tile of 2 examples, so that of Poisson-sampled batches some devices have tiles of padding alone.
    config = private_config(batch_size=16, accumulation_steps=2, shards=shards, privacy={"example_clip_norm": 0.05})
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    training = TrainingFunctions(config, model, len(SPLIT), jax.devices(), noise_multiplier=1.0)
    engine = training.compile(new_compiler())
    state = engine.init(keys_of(config.seeds_of(0)))
    *_, chunk = engine.train(state, on_device(SPLIT.images, SPLIT.labels, engine.mesh), steps_per_call=2)
    return jax.device_get(chunk.state.params)


def ordered_sums_are_exact():
    # Those of NumPy, shard after shard, to the bit: of a size that the shards do not divide.
    parts = np.random.default_rng(0).normal(size=(8, 1003)).astype(np.float32)
    mesh = make_mesh(jax.devices())
    add = jax.jit(data_parallel(lambda _, rows: ({"a": rows[0, :3], "b": rows[0, 3:]}, ()), mesh))
    sums, _ = add((), put(parts, over_batch(mesh)))
    expected = functools.reduce(np.add, parts)
    return np.concatenate([sums["a"], sums["b"]]).tobytes() == expected.tobytes()


compared = {name: compared(config) for name, config in CONFIGS.items()}
alone = private(1)
by_devices = {shards: difference(alone, private(shards)) for shards in (2, 4)}
compared |= {"ordered sums are exact": ordered_sums_are_exact()}
print(json.dumps({**compared, "private": by_devices}))
"""
TRAINED = ["mlp", "cnn in bfloat16", "noisy mlp in float16", "adam in parts, by the fastest sums"]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(run_on_devices(TRAIN, 8))


@pytest.mark.parametrize("name", TRAINED)
def test_eight_devices_train_as_one_does_each_with_its_share_of_the_work(name: str, results: dict[str, Any]) -> None:
    assert max(results[name]["differences"].values()) < 1e-4, results[name]["differences"]
    assert results[name]["moved"] > 1e-2, "else there is nothing to compare"
    assert results[name]["devices"] == [[1], [8]]
    assert not results[name]["replicas_differ"], "every device has the whole state"
    assert results[name]["share_of_flops"] < 0.6


@pytest.mark.parametrize("shards", ["2", "4"])
def test_several_devices_train_privately_as_one_does(shards: str, results: dict[str, Any]) -> None:
    assert results["private"][shards] < 1e-5, "the same batches, clipped sums and noise"


def test_sums_over_shards_are_added_in_the_order_of_the_shards(results: dict[str, Any]) -> None:
    assert results["ordered sums are exact"]


def test_more_shards_than_devices_are_refused_in_one_line() -> None:
    config = train_config(batch_size=8, shards=8)
    with pytest.raises(ConfigError, match=r"^train\.shards must be at most the number of devices, 1, got 8$"):
        TrainingFunctions(config, Model(config.model_config(SHAPE, NUM_CLASSES)), 10, jax.devices()[:1])
