"""What training costs: the lesson's loop, PyTorch and this project, on one processor, in one table.

    python -m benchmarks.training [--rounds 5] [--examples 55000] [--images 32x32x3]
    python -m benchmarks.training --models resnet --images 224x224x3 --examples 600

"A bare compiled loop" is the least that JAX needs for the network of this project: what is above it is the price of
records, norms and masks.

All train the same networks with Adam at a constant rate, without clipping, smoothing or augmentation, on the same uint8
images and labels drawn from a fixed seed, in shuffled whole batches; ours also with AdamW and Muon. Images have 28 × 28
pixels unless `--images` says otherwise. Each row is a process of its own with a round of warm-up, and all of a network
make their rounds in turn (`benchmarks.turns`). Times are medians over all rounds. A round is an epoch; of
convolutional networks, a part of one, scaled. Of PyTorch's two memory formats for them, the faster one is shown.

It takes about ten minutes on two cores and wants them for itself: a thread pool that waits for its slowest
thread suffers most from company. PyTorch is optional: `pip install torch`.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.record import record
from benchmarks.training_tasks import (
    IMAGE_SHAPE,
    PATCH,
    STAGES,
    ModelName,
    Optimizer,
    Precision,
    Task,
    available_cores,
    image_shape,
    suffix_of,
)
from benchmarks.turns import Measured, measure, raise_failures
from gradtrail.stages.common import plotting
from gradtrail.tracking.environment import environment

OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "muon")  # beside Adam, in the first setting
ROUND_EXAMPLES = {"cnn": 2_560, "resnet": 128}  # at most, in a round
SETTINGS: tuple[tuple[ModelName, int], ...] = (("mlp", 128), ("mlp", 512), ("cnn", 128), ("resnet", 32))
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
LESSON, EAGER, BARE = "the lesson's loop", "PyTorch eager", "a bare compiled loop"
WITHOUT_JIT, FEW_STEPS = f"{LESSON}, without jit", 20  # steps of a round of such a slow loop
DRAWN = {
    WITHOUT_JIT: "each operation dispatched from Python, without jit",
    LESSON: "a jitted step, called from Python",
    BARE: "a compiled loop over the steps",
    "ours, float32": "the same with the records of gradtrail",
}


def networks(shape: tuple[int, ...] = IMAGE_SHAPE) -> str:
    """Return the networks in words, for images of this shape."""
    sides = " × ".join(map(str, shape))
    cnn = "3 × 3 to 32 channels, pool, 3 × 3 to 64, pool, 128, 10"
    resnet = f"patches of {PATCH} × {PATCH}, a block each of {STAGES} channels, group norm"
    return f"Images: {sides}. MLP: {math.prod(shape)}-256-128-10. CNN: {cnn}. ResNet: {resnet}."


def tasks_by_row(
    model: ModelName, batch_size: int, examples: int, shape: tuple[int, ...] = IMAGE_SHAPE
) -> dict[str, list[Task]]:
    """Return the tasks of each row; of several, the fastest is shown."""
    whole = min(examples, ROUND_EXAMPLES.get(model, examples)) // batch_size * batch_size
    task = functools.partial(Task, model=model, batch_size=batch_size, examples=whole, image_shape=shape)
    slow: dict[str, list[Task]] = {}
    formats = (False,) if model == "mlp" else (False, True)
    pytorch = [task(loop="pytorch", channels_last=channels_last) for channels_last in formats]
    ours = {f"ours, {precision}": task(loop="ours", precision=precision) for precision in PRECISIONS}
    ours |= {f"{name}, native": replace(own, processor="native") for name, own in ours.items()}
    if (model, batch_size) == SETTINGS[0]:
        ours |= {f"ours, float32, {name}": task(loop="ours", optimizer=name) for name in OPTIMIZERS}
        slow = {WITHOUT_JIT: [task(loop="without_jit", examples=min(whole, FEW_STEPS * batch_size))]}
    return {
        LESSON: [task(loop="lesson")],
        **slow,
        EAGER: pytorch,
        "torch.compile": [replace(eager, compiles=True) for eager in pytorch],
        "PyTorch bfloat16 autocast": [replace(eager, precision="bfloat16") for eager in pytorch],
        "torch.compile, bfloat16 autocast": [replace(eager, precision="bfloat16", compiles=True) for eager in pytorch],
        BARE: [task(loop="bare")],
        **{name: [own] for name, own in ours.items()},
    }


def rows_of(
    setting: tuple[ModelName, int], tasks: Mapping[str, list[Task]], results: Mapping[Task, Measured], examples: int
) -> list[dict[str, Any]]:
    """Return the rows of a network and batch size: the fastest task of each; NaN if none was measured."""
    seconds = {task: results[task].median * examples / task.examples for own in tasks.values() for task in own}
    best = {name: min(own, key=lambda task: (math.isnan(seconds[task]), seconds[task])) for name, own in tasks.items()}
    lesson, eager = seconds[best[LESSON]], seconds[best[EAGER]]
    return [
        {
            "model": setting[0],
            "batch_size": setting[1],
            "name": f"{name}, channels_last" if task.channels_last else name,
            "note": results[task].note,
            "seconds_per_epoch": seconds[task],
            "examples_per_second": examples / seconds[task],
            "times_lesson": lesson / seconds[task],
            "times_pytorch_eager": eager / seconds[task],
        }
        for name, task in best.items()
    ]


def machine() -> dict[str, str]:
    """Return the machine and the versions of the measurement."""
    about = environment()
    processor = str(about["processor"].get("name", about["machine"]))
    found = {"processor": processor, "cores": str(available_cores()), "Python": platform.python_version()}
    for package in ("jax", "flax", "optax", "torch"):
        if importlib.util.find_spec(package):
            found[package] = importlib.metadata.version(package)
    return found


def as_table(rows: list[dict[str, Any]], caption: str) -> Table:
    """Return the table for a terminal."""
    table = Table(title=", ".join(f"{name} {value}" for name, value in machine().items()), caption=caption)
    table.add_column("training")
    for name in ("seconds\n/ epoch", "examples\n/ second", "× the\nlesson", "× PyTorch\neager"):
        table.add_column(name, justify="right", no_wrap=True)
    setting = None
    for row in rows:
        if setting != (setting := (row["model"], row["batch_size"])):
            table.add_section()
            table.add_row(f"[bold]{row['model'].upper()}, batch {row['batch_size']}")
        numbers = f"{row['seconds_per_epoch']:.3f}", f"{row['examples_per_second']:,.0f}"
        ratios = f"{row['times_lesson']:.2f}", f"{row['times_pytorch_eager']:.2f}"
        note = [escape(f"{row['name']}: {row['note']}")]
        table.add_row(*(note if row["note"] else [row["name"], *numbers, *ratios]))
    return table


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the times of a step of the first setting, with and without `jax.jit`."""
    milliseconds = {row["name"]: 1e3 * row["batch_size"] / row["examples_per_second"] for row in reversed(rows)}
    figure, axes = plotting.new_figure(f"A training step, {machine()['processor']}", size=(9, 3))
    axis, widths = axes[0, 0], [milliseconds[name] for name in DRAWN]
    for place, width in enumerate(widths):
        axis.text(width, place, f" {width:.2g} ms", va="center")
    axis.barh([*DRAWN.values()], widths, color=plotting.BLUE)
    axis.set(xscale="log", xlabel="milliseconds", xlim=(min(widths) / 2, 2 * max(widths)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", type=int, default=55_000)
    parser.add_argument("--picture", help="draw the first network's steps with and without jit")
    parser.add_argument("--images", type=image_shape, default=IMAGE_SHAPE, metavar="32x32x3")
    parser.add_argument("--models", nargs="+", choices=["mlp", "cnn", "resnet"], default=["mlp", "cnn"])
    options = parser.parse_args()
    settings = [(model, batch_size) for model, batch_size in SETTINGS if model in options.models]
    largest = max(batch_size for _, batch_size in settings)
    if not (1 <= options.rounds < 20 and options.examples >= largest):
        parser.error(f"--rounds must be at least 1 and below 20, --examples at least {largest}")
    tasks = {setting: tasks_by_row(*setting, options.examples, options.images) for setting in settings}
    groups = [[task for own in by_row.values() for task in own] for by_row in tasks.values()]
    results = measure("training_peers", groups, options.rounds)
    by_task = {measured.task: measured for measured in results}
    rows = [row for setting, own in tasks.items() for row in rows_of(setting, own, by_task, options.examples)]
    caption = f"{networks(options.images)} Medians; an epoch has {options.examples:,} examples"
    caption += ", a round of convolutional networks some of them, scaled"
    Console().print(as_table(rows, caption))
    measured = [*map(dataclasses.asdict, results)]
    name = f"training{suffix_of(options.images)}"
    record(name, {"caption": caption, "rows": rows, "measured": measured}, options)
    if options.picture:
        plotting.save(draw(rows), Path(options.picture))
    raise_failures(results)


if __name__ == "__main__":
    main()
