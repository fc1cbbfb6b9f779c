"""A training from blocks that are read as it goes is the training on the whole split, to the bit."""

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from factories import (
    NUM_CLASSES,
    ROOT,
    make_engine,
    new_compiler,
    private_config,
    random_split,
    seed_keys,
    train_config,
)

from gradtrail.core.common.batching import BLOCK, PADDING, WINDOW, Order, shuffled_batches, shuffled_window
from gradtrail.core.common.sharding import make_mesh
from gradtrail.core.common.split import Split
from gradtrail.core.data.config import AugmentationConfig
from gradtrail.core.nn.models import MLPConfig, Model
from gradtrail.core.train import feed
from gradtrail.core.train.batch_gradient import Examples
from gradtrail.core.train.loop import Chunk, Engine, compile_engine, make_program, train

LARGE = random_split(WINDOW + 2 * BLOCK + 77, shape=(2, 3))  # two windows, the second of them short
SMALL = random_split(10)  # in batches of 4: the last one holds 2
SPLITS = {"small": SMALL, "large": LARGE}
CHUNK = 50
CONFIGS = {
    "mlp": train_config(batch_size=2_000, epochs=1),
    "cnn in parts": train_config(batch_size=4, model="cnn", accumulation_steps=2),
    "noisy mlp": train_config(
        batch_size=4,
        mlp=MLPConfig(hidden=(5,), activation="relu", dropout=0.5),
        augmentation=AugmentationConfig(shift=1.0, rotation=10.0, scale=0.1, shear=5.0, cutout=1),
    ),
}


class Read:
    """A source that remembers what was read of it."""

    def __init__(self, split: Split, fault: Callable[[int], None] = lambda start: None):
        self._split, self._fault, self.ranges = split, fault, list[tuple[int, int]]()

    def __len__(self) -> int:
        return len(self._split)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        self._fault(start)
        self.ranges.append((start, stop))
        return self._split.images[start:stop].copy(), self._split.labels[start:stop].copy()


@functools.cache
def streaming(name: str, split_of: str, every: int | None = None) -> Engine:
    split = SPLITS[split_of]
    config = CONFIGS[name]
    model = Model(config.model_config(split.images.shape[1:], NUM_CLASSES))
    followed = None if every is None else np.arange(0, len(split), every)
    program = make_program(config, model, len(split), jax.local_devices(), streamed=True, followed=followed)
    return compile_engine(program, compiler=new_compiler())


def last(engine: Engine, examples: Examples | feed.Source, *, state: Any = None, steps_per_call: int = CHUNK) -> Chunk:
    state = engine.init(seed_keys(0)) if state is None else state
    *_, chunk = train(engine, state, examples, steps_per_call=steps_per_call)
    return chunk


def bits(chunk: Chunk) -> list[bytes]:
    state = dataclasses.replace(chunk.state, keys=jax.tree.map(jax.random.key_data, chunk.state.keys))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, chunk.records))]


each_training = pytest.mark.parametrize(
    ("name", "split_of"), [("mlp", "large"), ("cnn in parts", "small"), ("noisy mlp", "small")]
)


def test_blocks_train_as_the_whole_split_does() -> None:
    left, right = last(streaming("mlp", "large"), Read(LARGE)), last(*make_engine(CONFIGS["mlp"], LARGE))
    assert np.array_equal(left.records.rows.indices, right.records.rows.indices)
    for one, other in zip(jax.tree.leaves(left.state.params), jax.tree.leaves(right.state.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # XLA's older emitters, which `make test` takes, fuse the two programs otherwise
@each_training
def test_blocks_give_the_bits_of_the_whole_split(name: str, split_of: str) -> None:
    split = SPLITS[split_of]
    assert bits(last(streaming(name, split_of), Read(split))) == bits(last(*make_engine(CONFIGS[name], split)))


def test_a_training_goes_on_within_a_block_and_other_cuts_change_no_bit() -> None:
    engine = streaming("mlp", "large")
    assert engine.steps_per_block is not None
    assert 2 < engine.steps_per_block < engine.steps_per_epoch, "there are several blocks of several steps"
    for chunk in train(engine, engine.init(seed_keys(0)), Read(LARGE), steps_per_call=engine.steps_per_block - 1):
        if chunk.step == 2 * engine.steps_per_block - 1:
            break
    rest = train(engine, chunk.state, Read(LARGE), steps_per_call=1000, records=chunk.records)
    *_, end = rest
    assert bits(end) == bits(last(engine, Read(LARGE)))


def rows_of(order: Order, split: Split, steps_per_block: int) -> list[np.ndarray]:
    """The images of every step in the order of its rows."""
    mesh = make_mesh(jax.devices()[:1])
    found = []
    for block in feed.blocks(Read(split), order, mesh, steps_per_block=steps_per_block, first=0):
        for step in range(block.first, block.stop):
            places = feed.positions(jax.numpy.int32(step), order.batch_size, steps_per_block, 1)
            found.append(np.asarray(block.examples.images[places]))
    return found


@pytest.mark.parametrize("steps_per_block", [1, 3])
def test_every_step_finds_its_rows_and_padding_is_example_0(steps_per_block: int) -> None:
    key = jax.random.key(1)
    order = Order(len(LARGE), 30_000, lambda index: shuffled_window(len(LARGE), jax.numpy.int32(index), key=key))
    found = rows_of(order, LARGE, steps_per_block)
    batches = np.asarray(shuffled_batches(len(LARGE), 30_000, key=key))
    assert batches[-1, -1] == PADDING
    for step, images in zip(batches, found, strict=True):
        np.testing.assert_array_equal(images, LARGE.images[np.where(step == PADDING, 0, step)])


def test_each_block_of_examples_is_read_about_once_an_epoch_in_long_pieces() -> None:
    source = Read(LARGE)
    last(streaming("mlp", "large"), source)
    pieces = [found for found in source.ranges if found != (0, 1)]
    assert len(pieces) <= len(set(pieces)) + WINDOW // BLOCK, "only where a batch spans two windows, blocks come twice"
    assert sum(stop - start for start, stop in set(pieces)) == len(LARGE)


def test_the_records_tell_of_the_followed_examples_alone_and_the_training_is_the_same() -> None:
    every = 1_000
    of_all, of_some = (last(streaming("mlp", "large", each), Read(LARGE)) for each in (None, every))
    place = np.argsort(np.asarray(of_all.records.rows.indices).ravel())[-len(LARGE) :: every]  # padding is first
    for name in ("correct", "probability"):
        whole, some = (np.asarray(getattr(chunk.records.rows, name)).ravel() for chunk in (of_all, of_some))
        np.testing.assert_array_equal(some, whole[place])
    np.testing.assert_array_equal(of_some.records.rows.indices, np.arange(len(place)))
    assert len(np.unique(of_some.records.rows.probability)) > len(place) // 2
    without = [
        dataclasses.replace(each, records=dataclasses.replace(each.records, rows=None)) for each in (of_all, of_some)
    ]
    assert bits(without[0]) == bits(without[1])


def test_a_training_with_followed_examples_goes_on_in_its_second_window() -> None:
    engine = streaming("mlp", "large", 1_000)
    for chunk in train(engine, engine.init(seed_keys(0)), Read(LARGE), steps_per_call=1):
        if chunk.step * 2_000 > WINDOW + 1_000:
            break
    assert np.count_nonzero(np.asarray(chunk.records.rows.indices) == PADDING) > 0, "some are still to come"
    *_, end = train(engine, chunk.state, Read(LARGE), steps_per_call=1000, records=chunk.records)
    assert bits(end) == bits(last(engine, Read(LARGE)))


def test_until_its_visit_a_followed_example_is_padding() -> None:
    first = next(
        train(engine := streaming("mlp", "large", 1_000), engine.init(seed_keys(0)), Read(LARGE), steps_per_call=1)
    )
    seen = np.asarray(first.records.rows.indices)
    assert 0 < np.count_nonzero(seen != PADDING) < len(seen) // 10
    np.testing.assert_array_equal(seen[seen != PADDING], np.flatnonzero(seen != PADDING))
    assert np.all(first.records.rows.probability[seen == PADDING] == 0)


def test_what_a_source_raises_ends_the_training_at_the_block_that_needs_it() -> None:
    def fault(start: int) -> None:
        if start >= WINDOW:
            raise OSError("cut")

    engine = streaming("mlp", "large")
    with pytest.raises(OSError, match="cut"):
        last(engine, Read(LARGE, fault))


def test_a_private_training_is_not_streamed() -> None:
    config = private_config()
    with pytest.raises(ValueError, match="private"):
        make_program(config, Model(config.model_config((2, 3), NUM_CLASSES)), 100, jax.devices(), 1.0, streamed=True)


SHARDED = """
import dataclasses

import jax
import numpy as np
from factories import NUM_CLASSES, new_compiler, random_split, seed_keys, train_config

from gradtrail.core.common.batching import WINDOW
from gradtrail.core.data.config import AugmentationConfig
from gradtrail.core.nn.models import MLPConfig, Model
from gradtrail.core.train.loop import compile_engine, make_program, on_device, train

SPLIT = random_split(40)  # in batches of 16: the last one holds 8, so that one shard has padding alone


class Source:
    def __len__(self):
        return len(SPLIT)

    def read(self, start, stop):
        return SPLIT.images[start:stop], SPLIT.labels[start:stop]


def bits(config, streamed, followed=None):
    model = Model(config.model_config(SPLIT.images.shape[1:], NUM_CLASSES))
    program = make_program(config, model, len(SPLIT), jax.devices(), streamed=streamed, followed=followed)
    engine = compile_engine(program, compiler=new_compiler())
    examples = Source() if streamed else on_device(SPLIT.images, SPLIT.labels, engine.mesh)
    *_, chunk = train(engine, engine.init(seed_keys(0)), examples, steps_per_call=50)
    shape = program.examples.images.shape
    assert not streamed or program.examples.images.sharding.shard_shape(shape)[0] == shape[0] // 2
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((chunk.state.params, chunk.records))]


augmentation = AugmentationConfig(shift=1.0, rotation=10.0, scale=0.1, shear=5.0, cutout=1)
noisy = MLPConfig(hidden=(5,), activation="relu", dropout=0.5)
for config in (
    train_config(batch_size=16, shards=2),
    train_config(batch_size=16, shards=2, mlp=noisy, augmentation=augmentation, accumulation_steps=2),
):
    assert bits(config, True) == bits(config, False)
SPLIT = random_split(WINDOW + 5_000, shape=(2, 3))  # two windows
config = train_config(batch_size=2_000, shards=2, epochs=1)
followed = np.arange(0, len(SPLIT), 1_000)
assert bits(config, True, followed) == bits(config, False, followed)
print("same bits")
"""


@pytest.mark.slow
def test_each_of_two_shards_holds_its_rows_alone_and_the_bits_are_those_of_the_whole_split() -> None:
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout == "same bits\n"
