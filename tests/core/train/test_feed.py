"""A training from blocks that are read as it goes is the training on the whole split, to the bit."""

import dataclasses
import functools
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from factories import (
    NUM_CLASSES,
    make_engine,
    new_compiler,
    random_split,
    run_on_devices,
    seed_keys,
    train_config,
)

from gradtrail.core.batching import BLOCK, WINDOW
from gradtrail.core.data import Split
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model
from gradtrail.core.train.augmentation import NO_AUGMENTATION
from gradtrail.core.train.feed import steps_in_block
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.loop import Chunk, CompiledTraining, TrainingFunctions

LARGE = random_split(WINDOW + 2 * BLOCK + 77, shape=(2, 3))  # two windows, the second of them short
SMALL = random_split(10)  # in batches of 4: the last one holds 2
SPLITS = {"small": SMALL, "large": LARGE}
CHUNK = 50
CONFIGS = {
    "mlp": train_config(batch_size=2_000, epochs=1),
    "cnn in parts": train_config(batch_size=4, model="cnn", accumulation_steps=2),
    "noisy mlp": train_config(
        batch_size=4,
        model=MLP(hidden=(5,), activation="relu", dropout=0.5),
        augmentation=dataclasses.replace(
            NO_AUGMENTATION, shift=1.0, rotation=10.0, scale=0.1, shear=5.0, crop=1, mixup=1.0
        ),
    ),
}


@functools.cache
def streaming(name: str, split_of: str, every: int | None = None) -> CompiledTraining:
    split = SPLITS[split_of]
    config = CONFIGS[name]
    model = Model(config.model_config(split.images.shape[1:], NUM_CLASSES))
    sampled = None if every is None else np.arange(0, len(split), every)
    training = TrainingFunctions(config, model, len(split), jax.local_devices(), streamed=True, sampled=sampled)
    return training.compile(new_compiler())


def last(engine: CompiledTraining, examples: Examples | Split, state: Any = None, steps_per_call: int = CHUNK) -> Chunk:
    state = engine.init(seed_keys(0)) if state is None else state
    *_, chunk = engine.train(state, examples, steps_per_call=steps_per_call)
    return chunk


def bits(chunk: Chunk) -> list[bytes]:
    state = dataclasses.replace(chunk.state, keys=jax.tree.map(jax.random.key_data, chunk.state.keys))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, chunk.records))]


each_training = pytest.mark.parametrize(
    ("name", "split_of"), [("mlp", "large"), ("cnn in parts", "small"), ("noisy mlp", "small")]
)


def test_blocks_train_as_the_whole_split_does() -> None:
    left, right = last(streaming("mlp", "large"), LARGE), last(*make_engine(CONFIGS["mlp"], LARGE))
    assert np.array_equal(left.records.rows.indices, right.records.rows.indices)
    for one, other in zip(jax.tree.leaves(left.state.params), jax.tree.leaves(right.state.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # XLA's older emitters, which `make test` takes, fuse the two programs otherwise
@each_training
def test_blocks_give_the_bits_of_the_whole_split(name: str, split_of: str) -> None:
    split = SPLITS[split_of]
    assert bits(last(streaming(name, split_of), split)) == bits(last(*make_engine(CONFIGS[name], split)))


@pytest.mark.parametrize(
    ("shape", "steps"), [((28, 28), 256), ((32, 32, 3), 256), ((224, 224, 3), 6), ((999, 9999), 1)]
)
def test_a_block_has_at_most_128_mebibytes(shape: tuple[int, ...], steps: int) -> None:
    assert steps_in_block(128, shape, 1000) == steps
    assert steps_in_block(128, shape, 3) == min(steps, 3)


def test_training_resumes_within_a_block_with_the_same_bits() -> None:
    engine = streaming("mlp", "large")
    steps_per_block = engine.training.steps_per_block
    assert 2 < steps_per_block < engine.steps_per_epoch, "there are several blocks of several steps"
    for chunk in engine.train(engine.init(seed_keys(0)), LARGE, steps_per_call=steps_per_block - 1):
        if chunk.step == 2 * steps_per_block - 1:
            break
    rest = engine.train(chunk.state, LARGE, steps_per_call=1000, records=chunk.records)
    *_, end = rest
    assert bits(end) == bits(last(engine, LARGE))


def test_sampled_records_do_not_change_the_training() -> None:
    every = 1_000
    of_all, of_some = (last(streaming("mlp", "large", item), LARGE) for item in (None, every))
    place = np.argsort(np.asarray(of_all.records.rows.indices).ravel())[-len(LARGE) :: every]  # padding is first
    for name in ("correct", "probability"):
        whole, some = (np.asarray(getattr(chunk.records.rows, name)).ravel() for chunk in (of_all, of_some))
        np.testing.assert_array_equal(some, whole[place])
    np.testing.assert_array_equal(of_some.records.rows.indices, np.arange(len(place)))
    assert len(np.unique(of_some.records.rows.probability)) > len(place) // 2
    without = [
        dataclasses.replace(item, records=dataclasses.replace(item.records, rows=None)) for item in (of_all, of_some)
    ]
    assert bits(without[0]) == bits(without[1])


def test_memory_maps_train_as_arrays_do(tmp_path: Path) -> None:
    images = np.lib.format.open_memmap(tmp_path / "images.npy", "w+", LARGE.images.dtype, LARGE.images.shape)
    images[:] = LARGE.images
    mapped = dataclasses.replace(LARGE, images=np.asarray(np.load(tmp_path / "images.npy", mmap_mode="r")))
    engine = streaming("mlp", "large")
    assert bits(last(engine, mapped)) == bits(last(engine, LARGE))


def test_abandoned_training_leaves_no_thread() -> None:
    engine = streaming("mlp", "large")
    chunks = engine.train(engine.init(seed_keys(0)), LARGE, steps_per_call=1)
    next(chunks)
    assert any(thread.name.startswith("feed") for thread in threading.enumerate())
    chunks.close()
    assert not any(thread.name.startswith("feed") for thread in threading.enumerate())


SHARDED = """
import dataclasses

import jax
import numpy as np
from factories import NUM_CLASSES, new_compiler, random_split, seed_keys, train_config

from gradtrail.core.batching import WINDOW
from gradtrail.core.train.augmentation import NO_AUGMENTATION
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model
from gradtrail.core.train.loop import TrainingFunctions, on_device

SPLIT = random_split(40)  # in batches of 16: the last one holds 8, so that one shard has padding alone


def bits(config, streamed, sampled=None):
    model = Model(config.model_config(SPLIT.images.shape[1:], NUM_CLASSES))
    training = TrainingFunctions(config, model, len(SPLIT), jax.devices(), streamed=streamed, sampled=sampled)
    engine = training.compile(new_compiler())
    examples = SPLIT if streamed else on_device(SPLIT.images, SPLIT.labels, engine.mesh)
    *_, chunk = engine.train(engine.init(seed_keys(0)), examples, steps_per_call=50)
    shape = training.abstract_examples.images.shape
    assert not streamed or training.abstract_examples.images.sharding.shard_shape(shape)[1] == shape[1] // 2
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((chunk.state.params, chunk.records))]


augmentation = dataclasses.replace(NO_AUGMENTATION, shift=1.0, rotation=10.0, scale=0.1, shear=5.0, crop=1, mixup=1.0)
noisy = MLP(hidden=(5,), activation="relu", dropout=0.5)
for config in (
    train_config(batch_size=16, shards=2),
    train_config(batch_size=16, shards=2, model=noisy, augmentation=augmentation, accumulation_steps=2),
):
    assert bits(config, True) == bits(config, False)
SPLIT = random_split(WINDOW + 5_000, shape=(2, 3))  # two windows
config = train_config(batch_size=2_000, shards=2, epochs=1)
sampled = np.arange(0, len(SPLIT), 1_000)
assert bits(config, True, sampled) == bits(config, False, sampled)
print("same bits")
"""


@pytest.mark.nightly
def test_two_shards_give_the_bits_of_the_whole_split() -> None:
    assert run_on_devices(SHARDED, 2) == "same bits\n"
