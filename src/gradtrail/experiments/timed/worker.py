"""Runs in a child process: compiles the training of one revision of the code, and times bursts of its steps on request.

It is started as a script by the interpreter of its side, so that nothing is imported before the side's `src` is first
on the path. Its protocol is lines: it prints `ready` with the number of steps per epoch, and answers `run N` with the
seconds of N optimizer steps. It ends with its standard input. Output of libraries goes to stderr.
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
    """Compile the job in `sys.argv[1]`, a `Job` as JSON, and answer requests until the input ends."""
    job = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path[0] = job["source"]
    os.chdir(job["folder"])
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])
    steps_per_epoch, run = build(job)
    print("ready", steps_per_epoch, file=answers)
    for line in sys.stdin:
        print(run(int(line.split()[1])), file=answers)


def build(job: Mapping[str, Any]) -> tuple[int, Callable[[int], float]]:
    """Compile the training; return the number of steps per epoch, and a function that times a number of steps."""
    import dataclasses

    import jax
    import numpy as np

    import gradtrail
    from gradtrail.core.nn.models import Model
    from gradtrail.core.train import loop
    from gradtrail.core.train.config import TrainConfig
    from gradtrail.core.train.keys import keys_of
    from gradtrail.core.xla.compiler import Compiler
    from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_cpu_devices, set_up_jax
    from gradtrail.stages.common.params import load_section

    if not Path(gradtrail.__file__ or "").is_relative_to(job["source"]):
        raise ImportError(f"gradtrail was imported from {gradtrail.__file__}, not from {job['source']}")
    config = load_section("train", TrainConfig)
    runtime = dataclasses.replace(load_section("runtime", RuntimeConfig), debug_nans=False, disable_jit=False)
    set_up_jax(load_section("environment", EnvironmentConfig), runtime)
    set_cpu_devices(config.shards)
    switches: Any = jax.config
    switches.update("jax_compilation_cache_dir", job["cache"])
    switches.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    switches.update("jax_persistent_cache_min_entry_size_bytes", -1)

    count, shape, classes = job["examples"], tuple(job["image_shape"]), job["classes"]
    model = Model(config.model_config(shape, classes), remat=config.remat)
    noise: dict[str, Any] = {"noise_multiplier": 1.0} if config.privacy.enabled else {}
    program = loop.make_program(config, model, count, jax.local_devices(), **noise)
    engine = program.compile(Compiler(time.perf_counter))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, *shape), np.uint8)
    examples = loop.on_device(images, rng.integers(0, classes, count, np.int32), engine.mesh)
    keys = keys_of(config.seeds_of(config.seed))
    state = engine.init(keys)
    order = jax.block_until_ready(engine.order(state.keys, np.int32(0)))
    _write_programs(engine, job["programs"])

    def run(steps: int) -> float:
        """Run steps from the initial state, after one that is not timed; return the seconds."""
        state, records = engine.run_steps(
            engine.init(keys), engine.records(), examples, order, np.int32(0), np.int32(1)
        )
        jax.block_until_ready((state, records))
        done, started = 0, time.perf_counter()
        while done < steps:
            start = done % engine.steps_per_epoch
            stop = min(start + min(_STEPS_PER_CALL, steps - done), engine.steps_per_epoch)
            state, records = engine.run_steps(state, records, examples, order, np.int32(start), np.int32(stop))
            done += stop - start
        jax.block_until_ready((state, records))
        return time.perf_counter() - started

    return engine.steps_per_epoch, run


def _write_programs(engine: Any, folder: str | None) -> None:
    """Write the optimized HLO of each function to a folder, if one is given."""
    if folder:
        for function in engine.functions:
            (Path(folder) / f"{function.name}.hlo.txt").write_text(function.texts()["hlo"])


if __name__ == "__main__":
    main()
