"""What a private step costs: beside this project's ordinary step, `vmap(grad)`, PyTorch and Opacus, in two tables.

    python -m benchmarks.private_training [--rounds 9] [--quick] [--opacus-python ENVIRONMENT/bin/python]

All train the same networks with Adam in float32 on the same 55,000 images drawn from a fixed seed, clip the gradient of
each example to norm 1 and add noise of multiplier 1. Ours and Opacus' batches are Poisson-sampled, and drawing them is
timed; `vmap(grad)` and PyTorch's ordinary step have shuffled batches of a fixed size. Ours keeps the records of every
step. Opacus' own loader is a row of its own: with it, most of the time is spent on single images.

The network of Opacus' MNIST example has strides, which this project's networks do not have: there, our rows are a
network without strides and of as many multiplications in a forward pass (channels 8 and 24, 32 hidden units).

Each row is a process of its own, and all make their rounds in turn (`benchmarks.turns`). A round is an epoch, or as
many steps as take `--seconds`. Times are medians over the rounds after a warm-up; ratios are medians over the rounds of
the ratio within a round.

It takes a quarter of an hour on two cores (two minutes with `--quick`) and wants them for itself: the threads of
PyTorch wait for the slowest. On a machine with other work, ratios on one core are more to be trusted:

    taskset -c 0 python -m benchmarks.private_training --processor-seconds

PyTorch and Opacus are optional. They may have an environment of their own:

    python3 -m venv ~/opacus-env && ~/opacus-env/bin/pip install torch opacus
    python -m benchmarks.private_training --opacus-python ~/opacus-env/bin/python

`--recipes` runs the private recipes over five seeds instead, for their accuracies.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from ruamel.yaml import YAML

from benchmarks.private_peers import Method, Network, PrivateTask
from benchmarks.record import record
from benchmarks.training import machine, networks
from benchmarks.turns import Worker
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.environment import environment

Setting = tuple[Network, int]

SETTINGS: tuple[Setting, ...] = (("mlp", 512), ("mlp", 2048), ("cnn", 128), ("strided", 128))
TITLES: dict[Network, str] = {"mlp": "MLP", "cnn": "CNN", "strided": "strided CNN of Opacus' example"}
NAMES: dict[Method, str] = {
    "ordinary": "ours, ordinary",
    "noiseless": "ours, private, no noise",
    "private": "ours, private",
    "vmap": "JAX, vmap(grad), private",
    "torch": "PyTorch, ordinary",
    "ghost": "Opacus, ghost clipping",
    "loader": "Opacus, ghost, its loader",
    "hooks": "Opacus, hooks",
}
QUICK_METHODS: tuple[Method, ...] = ("ordinary", "private", "ghost", "hooks")
OF_TORCH: tuple[Method, ...] = ("torch", "ghost", "loader", "hooks")
NO_OPACUS = "not installed: pip install torch opacus"
RECIPE_SEEDS = "0,1,2,3,4"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A ratio of the times of two methods, and what it should be.

    Attributes:
        over: whose time the ratio divides by.
        most: that the ratio should be, or None.
        least: that the ratio should be, or None.
    """

    setting: Setting
    method: Method
    over: Method
    most: float | None = None
    least: float | None = None

    def met(self, ratio: float) -> bool:
        """Whether a ratio is as it should be."""
        return (self.most is None or ratio <= self.most) and (self.least is None or ratio >= self.least)


GOALS = (
    Goal(setting=("mlp", 512), method="private", over="ordinary", most=1.5),
    Goal(setting=("mlp", 2048), method="private", over="ordinary", most=1.25),
    Goal(setting=("cnn", 128), method="private", over="ordinary", most=1.3),
    Goal(setting=("mlp", 512), method="ghost", over="private", least=1.5),
    Goal(setting=("mlp", 2048), method="ghost", over="private", least=1.5),
    Goal(setting=("cnn", 128), method="ghost", over="private", least=1.0),
    Goal(setting=("strided", 128), method="ghost", over="private", least=1.0),
    Goal(setting=("strided", 128), method="hooks", over="private", least=1.0),
)


@dataclass(kw_only=True)
class Measured:
    """What the process of a method reported.

    Attributes:
        seconds: of a step, in each round.
        steps: of a round.
        note: why there are no times.
    """

    task: PrivateTask
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    note: str | None = None

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds) if self.seconds and not self.note else math.nan


def run(options: argparse.Namespace) -> list[Measured]:
    """Measure every method, setting by setting."""
    settings = [setting for setting in SETTINGS if not options.quick or setting[0] != "strided"]
    methods = QUICK_METHODS if options.quick else tuple(NAMES)
    found = []
    with progress_bar("private training", len(settings) * len(methods) * (options.rounds + 1), unit="rounds") as bar:
        for network, batch_size in settings:
            tasks = [
                PrivateTask(
                    method=method,
                    network=network,
                    batch_size=batch_size,
                    seconds=options.seconds,
                    clock="processor" if options.processor_seconds else "wall",
                )
                for method in methods
            ]
            found += measure(tasks, options, bar)
    return found


def measure(tasks: list[PrivateTask], options: argparse.Namespace, bar: Any) -> list[Measured]:
    """Measure methods in turn."""
    found = [Measured(task=task) for task in tasks]
    workers: list[tuple[Measured, Worker]] = []
    try:
        for measured in found:
            method, network = measured.task.method, measured.task.network
            bar.advance(message=f"{NAMES[method]}, {network}, {measured.task.batch_size}")
            if method in OF_TORCH and not (options.opacus_python or has_opacus()):
                measured.note = NO_OPACUS
            else:
                python = (method in OF_TORCH and options.opacus_python) or sys.executable
                workers.append((measured, worker := Worker("private_peers", measured.task, python)))
                measured.note = worker.note
                measured.versions, measured.steps = worker.ready or ({}, 0)
        for _ in range(options.rounds):
            for measured, worker in workers:
                if (seconds := worker.ask()) is not None:
                    measured.seconds.append(seconds)
                measured.note = worker.note
                bar.advance()
    finally:
        for _, worker in workers:
            worker.stop()
    return found


def has_opacus() -> bool:
    """Whether this environment has the peers."""
    return all(importlib.util.find_spec(name) for name in ("torch", "opacus"))


def ratio(found: list[Measured], setting: Setting, method: Method, over: Method) -> float:
    """Return the median of the ratio of two methods' times within a round; NaN where one was not measured."""
    of = {
        measured.task.method: measured.seconds
        for measured in found
        if (measured.task.network, measured.task.batch_size) == setting and not measured.note
    }
    pairs = zip(of.get(method, ()), of.get(over, ()), strict=False)
    ratios = [seconds / others for seconds, others in pairs]
    return statistics.median(ratios) if ratios else math.nan


def rows(found: list[Measured]) -> list[dict[str, Any]]:
    """Return the rows of the first table."""
    table = []
    for measured in found:
        task = measured.task
        setting = task.network, task.batch_size
        table.append(
            {
                "network": task.network,
                "batch_size": task.batch_size,
                "method": task.method,
                "milliseconds_per_step": 1e3 * measured.median,
                "examples_per_second": task.batch_size / measured.median,
                "ratio_to_ordinary": ratio(found, setting, task.method, "ordinary"),
                "ratio_to_private": ratio(found, setting, task.method, "private"),
                "note": measured.note,
            }
        )
    return table


def goals(found: list[Measured]) -> list[dict[str, Any]]:
    """Return the rows of the second table."""
    ratios = [ratio(found, goal.setting, goal.method, goal.over) for goal in GOALS]
    return [
        {**dataclasses.asdict(goal), "ratio": value, "met": goal.met(value)}
        for goal, value in zip(GOALS, ratios, strict=True)
        if math.isfinite(value)
    ]


def as_table(found: list[Measured]) -> Table:
    """Return the table of times for a terminal."""
    versions = {name: text for measured in found for name, text in measured.versions.items()}
    about = ", ".join(f"{name} {text}" for name, text in (machine() | versions).items() if name != "processor")
    table = Table(title=f"{processor()}\n{about}", caption=f"{networks()} Medians, float32.")
    table.add_column("a step")
    for name in ("ms", "examples\n/ second", "× our\nordinary", "× our\nprivate"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in rows(found):
        if last != (last := (row["network"], row["batch_size"])):
            table.add_section()
            table.add_row(f"[bold]{TITLES[row['network']]}, batch {row['batch_size']}")
        name = NAMES[row["method"]]
        if row["note"]:
            table.add_row(escape(f"{name}: {row['note']}"))
            continue
        numbers = f"{row['milliseconds_per_step']:.2f}", f"{row['examples_per_second']:,.0f}"
        table.add_row(name, *numbers, f"{row['ratio_to_ordinary']:.2f}", f"{row['ratio_to_private']:.2f}")
    return table


def goals_table(found: list[Measured]) -> Table:
    """Return the table of goals for a terminal."""
    table = Table(title="ratios of times, and their goals")
    for name in ("", "ratio", "goal", "met"):
        table.add_column(name)
    for row in goals(found):
        network, batch_size = row["setting"]
        what = f"{NAMES[row['method']]} / {NAMES[row['over']]}, {TITLES[network]}, {batch_size}"
        limit = f"≤ {row['most']}" if row["most"] else f"≥ {row['least']}"
        table.add_row(escape(what), f"{row['ratio']:.2f}", limit, "yes" if row["met"] else "no")
    return table


def processor() -> str:
    """Return what the machine calls its processor."""
    about = environment()
    return str(about["processor"].get("name", about["machine"]))


def run_recipes() -> None:
    """Run every private recipe over five seeds, and print the accuracies of all recipes."""
    recipes = YAML(typ="safe", pure=True).load(ROOT / "experiments.yaml")
    names = [name for name in recipes if name.startswith("dp_")]
    if not names:
        raise SystemExit("experiments.yaml has no recipe whose name begins with dp_")
    for name in names:
        subprocess.run(("gradtrail", "compare", name, "--seeds", RECIPE_SEEDS), check=True)
    subprocess.run(("gradtrail", "compare", "--all", "--markdown", "--seeds", RECIPE_SEEDS), check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default: 9; 3 with --quick")
    parser.add_argument("--seconds", type=float, help="of a round; default: 1; 0.3 with --quick")
    parser.add_argument("--quick", action="store_true", help="few rounds of the rows that have goals")
    parser.add_argument("--opacus-python", help="interpreter of the environment that has PyTorch and Opacus")
    parser.add_argument("--processor-seconds", action="store_true", help="of all threads, in place of the wall's")
    parser.add_argument("--recipes", action="store_true", help="run the private recipes instead")
    options = parser.parse_args()
    if options.recipes:
        run_recipes()
        return
    options.rounds = (3 if options.quick else 9) if options.rounds is None else options.rounds
    options.seconds = (0.3 if options.quick else 1.0) if options.seconds is None else options.seconds
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds must be at least 1, --seconds more than 0")
    found = run(options)
    console = Console()
    console.print(as_table(found))
    console.print(goals_table(found))
    report = {"rows": rows(found), "goals": goals(found), "measured": [*map(dataclasses.asdict, found)]}
    options.opacus_python = bool(options.opacus_python)  # a path of this machine is no result
    record("private_training", report, options)
    failures = [f"{measured.task}: {measured.note}" for measured in found if measured.note not in (None, NO_OPACUS)]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
