"""Compiles a training as the stage does, and times a few of its steps on random images."""

import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gradtrail.core.data import Split
from gradtrail.core.nn.inference import VALIDATION_BATCH_SIZE
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import on_host
from gradtrail.core.train.keys import keys_of
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_cpu_devices, set_up_jax
from gradtrail.stages.common.params import IMAGE_FILES, PARAMS, validate
from gradtrail.stages.common.setup import cached_compiler, take_cache_faults
from gradtrail.stages.data.data_files import read_info
from gradtrail.stages.datasets import DATASETS
from gradtrail.stages.dp.accounting import account
from gradtrail.stages.train.training import Training

_SECONDS = 0.5  # time of the timed steps
_STEPS = 10  # steps of a call
_CLASSES = 10  # of every entry of the catalog; those of image files are not counted before `fetch`


def set_up(params: Mapping[str, Any]) -> None:
    """Set JAX up as the stage does; before JAX looks for devices."""
    config, environment, runtime = _configs(params)
    set_up_jax(environment, runtime)
    set_cpu_devices(config.shards)


def _configs(params: Mapping[str, Any]) -> tuple[TrainConfig, EnvironmentConfig, RuntimeConfig]:
    runtime = validate(params["runtime"], RuntimeConfig, f"{PARAMS}: runtime")
    return (
        validate(params["train"], TrainConfig, f"{PARAMS}: train"),
        validate(params["environment"], EnvironmentConfig, f"{PARAMS}: environment"),
        dataclasses.replace(runtime, debug_nans=False, disable_jit=False),
    )


def require_network(params: Mapping[str, Any]) -> None:
    """Build the network for the images of a data set that is not here yet, from shapes alone.

    Raises:
        UserError, ConfigError: the network cannot be built; one line.
    """
    dataset, pictures = params["fetch"]["dataset"], params["fetch"]["pictures"]
    shape = DATASETS[dataset].image_shape
    if dataset in IMAGE_FILES:
        shape = (*pictures["size"], *([3] if pictures["color"] else []))
    if dataset != "idx":  # whose files alone know the shape
        Model(_configs(params)[0].model_config(shape, _CLASSES))


def time_training(params: Mapping[str, Any], num_examples: int) -> dict[str, Any]:
    """Return seconds and memory of a training on so many examples of the data set in `data/processed`.

    Raises:
        UserError, ConfigError: the training cannot be made, or does not fit into memory; one line.
    """
    config, _, runtime = _configs(params)
    info = read_info(Path("data/processed"))
    training = Training(
        config=config,
        runtime=runtime,
        info=info,
        train=_random_examples(num_examples, info.image_shape, info.num_classes),
        validation=_random_examples(VALIDATION_BATCH_SIZE, info.image_shape, info.num_classes),
        devices=jax.local_devices(),
        steps_per_call=_STEPS,
        spending=account(config, num_examples) if config.privacy.enabled else None,
    )
    training.compile(cached_compiler(runtime))
    for line in take_cache_faults()[1]:
        print(f"warning: {line}", file=sys.stderr)
    program, split = training.program, training.train
    examples = split if training.is_streamed else loop.on_device(split.images, split.labels, program.mesh)
    state = program.init(keys_of(config.seeds_of(config.seed)))
    started = time.perf_counter()
    for number, chunk in enumerate(loop.train(program, state, examples, steps_per_call=_STEPS)):
        jax.block_until_ready(chunk.state.step)
        state = chunk.state
        if number > 1 and time.perf_counter() - started > _SECONDS:
            break
    weights = on_host(program.evaluation_params(state))
    for _ in range(4):
        training.validate(weights)
    seconds = {function.name: function.calls.steady for function in training.functions if function.calls}
    return {
        "step_seconds": seconds["train_step"],
        "predict_seconds": seconds["predict"] / training.predict.batch_size,  # of an example
        "total_bytes": max(function.cost.total_bytes for function in training.functions),
    }


def _random_examples(count: int, shape: tuple[int, ...], num_classes: int) -> Split:
    rng, ids = np.random.default_rng(0), np.arange(count, dtype=np.int32)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    labels = dict.fromkeys(("labels", "true_labels", "given_labels", "corrected_labels"), ids % num_classes)
    return Split(images=images, example_id=ids, **labels)
