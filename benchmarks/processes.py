"""What it costs to train in several processes, and to add in a fixed order, in turn.

    python -m benchmarks.processes [--rounds 5] [--steps 100] [--shards 4]

The training of `params.yaml` on random images, with that many shards: on 1, 2 and 4 processes, with either
`train.reduction`; and with one shard, the plain training. The processes of a line share the cores, and lines that
several processes make start them anew each round: rates of a round are comparable, those of two rounds are not.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from subprocess import run as run_command
from typing import get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from gradtrail.core.train.config import ReductionKind, TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.stage import Stage
from gradtrail.support.ranks import is_follower

NUM_EXAMPLES, SHAPE, NUM_CLASSES = 12_800, (28, 28), 10
_WORK, _TOLD = "benchmarks.processes", "GRADTRAIL_BENCHMARK_RATE"  # the worker, and the file that gets its rate


def work(shards: int, reduction: ReductionKind, steps: int) -> None:
    """Train for so many steps, after a warm-up, and write the steps per second."""
    import jax

    from gradtrail.core.nn.models import Model
    from gradtrail.core.train import loop
    from gradtrail.stages.common import processes
    from gradtrail.stages.common.setup import cached_compiler

    stage = Stage("train")
    stage.set_up()
    processes.join(60.0)
    found = load_section("train", TrainConfig)
    config = dataclasses.replace(found, shards=shards, reduction=reduction, privacy=NOT_PRIVATE)
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    program = loop.make_program(config, model, NUM_EXAMPLES, processes.devices(shards))
    engine = program.compile(cached_compiler(stage.runtime))
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (NUM_EXAMPLES, *SHAPE), np.uint8), rng.integers(0, 10, NUM_EXAMPLES, np.int32)
    examples = loop.on_device(images, labels, engine.mesh)
    state, records = engine.init(keys_of(config.seeds_of(0))), engine.records()
    order = engine.order(state.keys, np.int32(0))
    processes.agreed(lambda: None)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        state, records = jax.block_until_ready(
            engine.run_steps(state, records, examples, order, np.int32(0), np.int32(steps))
        )
        seconds = time.perf_counter() - started
    if not is_follower():
        Path(os.environ[_TOLD]).write_text(json.dumps(steps / seconds), encoding="utf-8")
    processes.leave()


def rate(count: int, shards: int, work: str, steps: int) -> float:
    """Return the steps per second of so many processes, which are started for it."""
    told = Path(".gradtrail") / "rate.json"
    told.parent.mkdir(exist_ok=True)
    worker = [sys.executable, "-m", _WORK, "--work", work, "--steps", str(steps), "--shards", str(shards)]
    command = worker if count == 1 else [sys.executable, "-m", "gradtrail.launch", "-n", str(count), *worker]
    run_command(command, check=True, env=os.environ | {_TOLD: str(told)})
    found: float = json.loads(told.read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--work", choices=get_args(ReductionKind), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.shards, arguments.work, arguments.steps)
        return
    counts = [count for count in (1, 2, 4) if arguments.shards % count == 0]
    cases = {"one shard": (1, 1, "ordered")}
    for count in counts:
        for reduction in get_args(ReductionKind):
            cases[f"{count} processes, {reduction}"] = (count, arguments.shards, reduction)
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(arguments.rounds):
        for name, (count, shards, work_of) in cases.items():
            rates[name].append(rate(count, shards, work_of, arguments.steps))
    table = Table("case", "steps/s", "share of one process with one shard")
    figures = {}
    for name, found in rates.items():
        ratio = statistics.median(a / b for a, b in zip(found, rates["one shard"], strict=True))
        figures[name] = {"per_second": statistics.median(found), "share_of_one_process": ratio}
        table.add_row(name, f"{statistics.median(found):,.0f}", f"{ratio:.2f}")
    Console().print(table)
    record("processes", figures, arguments)


if __name__ == "__main__":
    main()
