"""Runs in a child process in either environment: static costs, programs, and one epoch of training for some seeds.

It is started with the interpreter of its environment, and writes only into the given folder.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.privacy import placeholder_noise
from gradtrail.core.xla.compiler import Compiler
from gradtrail.experiments.cost_gate import measure
from gradtrail.stages.artifacts.data_files import read_info, read_split
from gradtrail.stages.common.files import write_json
from gradtrail.stages.common.params import load_section

DATA = Path("data/processed")
RESULT, PROGRAMS = "result.json", "programs"


def main() -> None:
    """Write `result.json`, `programs/<stage>/<function>.hlo.txt` and `seed-<n>.npz` into the folder `sys.argv[1]`.

    `sys.argv[2]` are the seeds, as JSON.
    """
    folder = Path(sys.argv[1])

    def keep(stage: str, compiler: Compiler) -> None:
        for name, function in compiler.functions.items():
            path = folder / PROGRAMS / stage / f"{name}.hlo.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(function.texts()["hlo"], encoding="utf-8")

    costs = measure(keep).costs
    accuracies = train(folder, json.loads(sys.argv[2]))
    write_json(folder / RESULT, {"platform": jax.default_backend(), "costs": costs, "accuracies": accuracies})


def train(folder: Path, seeds: list[int]) -> list[float]:
    """Train for one epoch with each seed; write the weights, and return the validation accuracies."""
    config = dataclasses.replace(load_section("train", TrainConfig), epochs=1)
    info = read_info(DATA)
    training, validation = (read_split(DATA / f"{name}") for name in ("train", "validation"))
    model = Model(config.model_config(info.image_shape, info.num_classes), remat=config.remat)
    compiler = Compiler(time.perf_counter)
    noise = placeholder_noise(config.privacy)
    program = loop.make_program(config, model, len(training), jax.local_devices(), noise)
    engine = program.compile(compiler)
    predict = inference.compile_predict(model, inference.VALIDATION_BATCH_SIZE, compiler=compiler)
    examples = loop.on_device(training.images, training.labels, engine.mesh)
    accuracies = []
    for seed in seeds:
        state = engine.init(keys_of(dataclasses.replace(config, seed=seed).seeds_of(seed)))
        for chunk in loop.train(engine, state, examples, steps_per_call=engine.steps_per_epoch):
            state = chunk.state
        params = engine.evaluation_params(state)
        leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(params)}
        np.savez(folder / f"seed-{seed}.npz", allow_pickle=False, **leaves)
        accuracies.append(inference.validate(predict, params, validation.images, validation.labels)["accuracy"])
    return accuracies


if __name__ == "__main__":
    main()
