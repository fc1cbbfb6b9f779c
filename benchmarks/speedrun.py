"""Fewest seconds to 99 %: a recipe over many seeds in one process, with one compilation; a table of one row.

    python -m benchmarks.speedrun [--recipe cnn_fast] [--precision float32] [--seeds 30]

The recipe's networks are trained with the seeds 0, 1, 2 … on the training split of `data/processed`, which `make repro`
makes, and evaluated on the test split after their last step alone. Training is from the initial weights to the last
step, shuffling included and evaluation not; compiling is counted once, without the cache. Times are means. Processor
seconds are those of all cores together, and say more than the seconds where other processes run. It wants the machine
for itself.
"""

import argparse
import dataclasses
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from benchmarks.training import machine
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.experiments.compare.spec import Comparison, read_entries
from gradtrail.stages.artifacts.data_files import read_info, read_split
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_up_jax
from gradtrail.stages.common.params import PARAMS, changed, load_section, read_yaml, validate
from gradtrail.support.progress import progress_bar

DATA = Path("data/processed")


@dataclass(frozen=True, kw_only=True)
class Speedrun:
    """What was measured.

    Attributes:
        accuracies: on the test split, in the order of the seeds.
        seconds: of each training.
        processor_seconds: of each training, of all cores together.
        compile_seconds: of all functions of a training, once.
        load: average number of running processes of the last minute, at the end.
    """

    recipe: str
    precision: str
    epochs: int
    accuracies: list[float]
    seconds: list[float]
    processor_seconds: list[float]
    compile_seconds: float
    load: float


def recipes() -> dict[str, Comparison]:
    """Return the entries of `experiments.yaml` that have one variant."""
    entries = read_entries().items()
    return {name: entry for name, entry in entries if isinstance(entry, Comparison) and entry.baseline is None}


def run(recipe: str, precision: str | None, num_seeds: int) -> Speedrun:
    """Train and evaluate the recipe with each seed; in another precision, where one is given."""
    import jax

    from gradtrail.core.nn.inference import compile_predict_within
    from gradtrail.core.nn.inference import validate as evaluate
    from gradtrail.core.nn.models import Model
    from gradtrail.core.train import loop
    from gradtrail.core.train.config import MemberSeeds
    from gradtrail.core.train.privacy import NOT_PRIVATE
    from gradtrail.core.xla.compiler import Compiler

    params = changed(read_yaml(PARAMS), recipes()[recipe].set)
    set_up_jax(load_section("environment", EnvironmentConfig), load_section("runtime", RuntimeConfig))
    config = dataclasses.replace(validate(params["train"], TrainConfig, f"{recipe}: train"), privacy=NOT_PRIVATE)
    config = dataclasses.replace(config, precision=precision or config.precision)
    info = read_info(DATA)
    train, test = (read_split(DATA / f"{name}") for name in ("train", "test"))
    model = Model(config.model_config(train.images.shape[1:], info.num_classes))
    program = loop.make_program(config, model, len(train), jax.local_devices())
    started = time.perf_counter()
    engine = program.compile(Compiler(time.perf_counter))
    compile_seconds = time.perf_counter() - started
    predict = compile_predict_within(model, compiler=Compiler(time.perf_counter))
    examples = jax.block_until_ready(loop.on_device(train.images, train.labels, program.mesh))
    accuracies, seconds, processor_seconds = [], [], []
    with progress_bar(recipe, num_seeds, unit="steps") as bar:
        for seed in range(num_seeds):
            started, processor_started = time.perf_counter(), time.process_time()
            state = engine.init(keys_of(MemberSeeds.from_one(seed)))
            for chunk in loop.train(engine, state, examples, steps_per_call=engine.steps_per_epoch):
                state = chunk.state
            weights = jax.block_until_ready(engine.evaluation_params(state))
            seconds.append(time.perf_counter() - started)
            processor_seconds.append(time.process_time() - processor_started)
            accuracies.append(evaluate(predict, weights, test)["accuracy"])
            bar.advance()
    return Speedrun(
        recipe=recipe,
        precision=config.precision,
        epochs=config.epochs,
        accuracies=accuracies,
        seconds=seconds,
        processor_seconds=processor_seconds,
        compile_seconds=compile_seconds,
        load=os.getloadavg()[0],
    )


def as_table(found: Speedrun) -> Table:
    """Return the table for a terminal."""
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    table = Table(title=about, caption=f"{found.epochs} epochs. Load {found.load:.1f}.")
    table.add_column("recipe", no_wrap=True)
    cells = {
        "seeds": f"{len(found.accuracies)}",
        "test\naccuracy": f"{statistics.mean(found.accuracies):.2%} ± {statistics.stdev(found.accuracies):.2%}",
        "training,\nseconds": f"{statistics.mean(found.seconds):.2f}",
        "of all\ncores": f"{statistics.mean(found.processor_seconds):.2f}",
        "compiling,\nseconds": f"{found.compile_seconds:.1f}",
    }
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(f"{found.recipe}, {found.precision}", *cells.values())
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cnn_fast", choices=list(recipes()))
    parser.add_argument("--precision", choices=get_args(Precision), help="in the place of the recipe's")
    parser.add_argument("--seeds", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2")
    found = run(arguments.recipe, arguments.precision, arguments.seeds)
    Console().print(as_table(found))
    record("speedrun", dataclasses.asdict(found), arguments)


if __name__ == "__main__":
    main()
