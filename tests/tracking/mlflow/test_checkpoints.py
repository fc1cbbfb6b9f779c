"""A checkpoint holds a whole training state, PRNG key included, to the bit."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from factories import make_engine, random_split, run_training, train_config

from gradtrail.core.train.step import TrainState
from gradtrail.tracking.mlflow.checkpoints import load_checkpoint, save_checkpoint, temporary_checkpoint


def leaves(state: TrainState) -> list[np.ndarray]:
    plain = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(plain)]


@pytest.mark.parametrize(
    "overrides", [{"precision": "float16", "average_decay": 0.9}, {"optimizer": "schedule_free"}], ids=str
)
def test_a_training_goes_on_from_a_checkpoint_to_the_same_bits(overrides: dict[str, Any], tmp_path: Path) -> None:
    """Loss scale, moving average and the state of any optimizer are part of it."""
    engine, examples = make_engine(train_config(**overrides), random_split(10))
    chunks = run_training(engine, examples, steps_per_call=2, seed=3)
    save_checkpoint(tmp_path / "checkpoint", chunks[0].state)
    restored = load_checkpoint(tmp_path / "checkpoint", like=chunks[-1].state)
    for found, expected in zip(leaves(restored), leaves(chunks[0].state), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    assert jax.dtypes.issubdtype(restored.key.dtype, jax.dtypes.prng_key)
    for found, expected in zip(
        leaves(run_training(engine, examples, state=restored)[-1].state), leaves(chunks[-1].state), strict=True
    ):
        assert found.tobytes() == expected.tobytes()


def test_shapes_are_enough_to_read_one_and_a_temporary_one_goes_away() -> None:
    engine, _ = make_engine(train_config(), random_split(10))
    state = engine.init(jax.random.key(0))
    with temporary_checkpoint(state) as folder:
        restored = load_checkpoint(folder, jax.eval_shape(lambda: state))
        assert folder.is_dir()
    assert not folder.exists()
    assert int(restored.step) == 0
