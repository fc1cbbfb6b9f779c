"""Runs in a child process: compiles the training of one revision of the code, and times bursts of its steps on request.

It is started as a script by the interpreter of its side, so that nothing is imported before the side's `src` is first
on the path. It prints the number of steps per epoch, answers each line `N` with the seconds of N optimizer steps, and
ends with its standard input. Output of libraries goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_STEPS_PER_CALL = 100  # as in a training


def main() -> None:
    """Compile the revision in `sys.argv[1]`, given as JSON, and answer requests until the input ends."""
    revision = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.chdir(revision["folder"])
    sys.path[0] = str(Path("src").resolve())
    steps_per_epoch, run = build(revision)
    print(steps_per_epoch, file=answers)
    for line in sys.stdin:
        print(run(int(line)), file=answers)


def build(revision: Mapping[str, Any]) -> tuple[int, Callable[[int], float]]:
    """Compile the training; return the number of steps per epoch, and a function that times a number of steps."""
    import dataclasses

    import jax
    import numpy as np

    from gradtrail.core.nn.models import Model
    from gradtrail.core.train import loop
    from gradtrail.core.train.config import TrainConfig
    from gradtrail.core.train.keys import keys_of
    from gradtrail.core.xla.compiler import Compiler
    from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_cpu_devices, set_up_jax
    from gradtrail.stages.common.params import load_section

    # The configuration of the training stage, with a compilation cache for later processes of this side
    config = load_section("train", TrainConfig)
    runtime = dataclasses.replace(load_section("runtime", RuntimeConfig), disable_jit=False)
    set_up_jax(load_section("environment", EnvironmentConfig), runtime)
    set_cpu_devices(config.shards)
    switches: Any = jax.config
    switches.update("jax_compilation_cache_dir", revision["cache"])
    switches.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    switches.update("jax_persistent_cache_min_entry_size_bytes", -1)

    # The compiled training, and random images
    count, shape, classes = revision["examples"], tuple(revision["image_shape"]), revision["classes"]
    model = Model(config.model_config(shape, classes), remat=config.remat)
    noise: dict[str, Any] = {"noise_multiplier": 1.0} if config.privacy.enabled else {}
    functions = loop.TrainingFunctions(config, model, count, jax.local_devices(), **noise)
    training = functions.compile(Compiler(time.perf_counter))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, *shape), np.uint8)
    examples = loop.on_device(images, rng.integers(0, classes, count, np.int32), training.mesh)
    keys = keys_of(config.seeds_of(config.seed))
    order = jax.block_until_ready(training.order(training.init(keys).keys, np.int32(0)))

    def run(steps: int) -> float:
        """Run steps from the initial state, after one that is not timed; return the seconds."""
        state, records = training.init(keys), training.records()
        state, records = training.run_steps(state, records, examples, order, np.int32(0), np.int32(1))
        jax.block_until_ready((state, records))
        done, started = 0, time.perf_counter()
        while done < steps:
            start = done % training.steps_per_epoch
            stop = min(start + min(_STEPS_PER_CALL, steps - done), training.steps_per_epoch)
            state, records = training.run_steps(state, records, examples, order, np.int32(start), np.int32(stop))
            done += stop - start
        jax.block_until_ready((state, records))
        return time.perf_counter() - started

    return training.steps_per_epoch, run


if __name__ == "__main__":
    main()
