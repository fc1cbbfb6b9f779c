"""What training costs: the lesson's loop, PyTorch and this project, on one processor, in one table.

    python -m benchmarks.training [--rounds 5] [--examples 55000] [--images 32x32x3]

"A bare compiled loop" is the least that JAX needs for the network of this project: what is above it is the price of
records, norms and masks.

All train the same networks with Adam at a constant rate, without clipping, smoothing or augmentation, on the same uint8
images and labels drawn from a fixed seed, in shuffled whole batches; ours also with AdamW and Muon. Images have 28 × 28
pixels unless `--images` says otherwise. Each row is a process of its own with a round of warm-up, and all of a network
make their rounds in turn (`benchmarks.turns`). Times are medians over all rounds. A round is an epoch; of the
convolutional network, a part of one, scaled. Of PyTorch's two memory formats for convolutions, the faster one is shown.

"Share of matmul rate" is FLOP/s achieved over FLOP/s of the bare matrix products. The FLOPs are those of the network's
matrix products in a step, forward and backward: 2 × rows × inner × columns each, convolutions as products of kernel and
patches, without the gradient of the images. The bare products are the same shapes in JAX at the same precision and with
float32 sums, each in its faster orientation and with nothing else to do, measured in the same run: the second table. As
the FLOPs are the same, the share is the time of these products over the time of training; it can exceed 100 % where a
peer has faster kernels than JAX.

It takes about ten minutes on two cores and wants them for itself: a thread pool that waits for its slowest
thread suffers most from company. PyTorch is optional: `pip install torch`.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import math
import platform
import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.record import record
from benchmarks.training_tasks import (
    IMAGE_SHAPE,
    ModelName,
    Optimizer,
    Peer,
    Precision,
    Task,
    available_cores,
    flops_per_step,
    image_shape,
    suffix_of,
)
from benchmarks.turns import Worker
from gradtrail.support.progress import progress_bar
from gradtrail.tracking.environment import environment

OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "muon")  # beside Adam, in the first setting
CNN_EXAMPLES = 2_560  # in a round
SETTINGS: tuple[tuple[ModelName, int], ...] = (("mlp", 128), ("mlp", 512), ("cnn", 128))
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
LESSON, EAGER = "the lesson's loop", "PyTorch eager"
NO_PYTORCH = "PyTorch is not installed: pip install torch"


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What all processes reported.

    Attributes:
        examples: in an epoch.
        seconds: of every timed round, scaled to an epoch.
        notes: why a peer was not measured.
    """

    examples: int
    image_shape: tuple[int, ...]
    seconds: dict[Peer, list[float]]
    notes: dict[Peer, str]

    def median(self, peer: Peer) -> float | None:
        """Return the seconds of an epoch."""
        return None if peer in self.notes else statistics.median(self.seconds[peer])

    def fastest(self, peers: list[Peer]) -> Peer:
        """Return the one with the smallest median; the first one where none was measured."""
        return min(peers, key=lambda peer: self.median(peer) or math.inf)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table; None where there was nothing to measure or to compare with.

    Attributes:
        note: shown in place of numbers.
        ratio_to_lesson: how many times as fast; so is `ratio_to_pytorch_eager`.
        share_of_matmul_rate: as the module defines it.
    """

    model: ModelName
    batch_size: int
    name: str
    note: str | None
    seconds_per_epoch: float | None
    examples_per_second: float | None
    ratio_to_lesson: float | None
    ratio_to_pytorch_eager: float | None
    share_of_matmul_rate: float | None


@dataclass(frozen=True, kw_only=True)
class BareRow:
    """A row of the second table: the matrix products of an epoch with nothing else to do."""

    model: ModelName
    batch_size: int
    precision: Precision
    seconds_per_epoch: float | None
    flops_per_second: float | None


def networks(shape: tuple[int, ...] = IMAGE_SHAPE) -> str:
    """Return the networks in words, for images of this shape."""
    sides = " × ".join(map(str, shape))
    cnn = "3 × 3 to 32 channels, pool, 3 × 3 to 64, pool, 128, 10"
    return f"Images: {sides}. MLP: {math.prod(shape)}-256-128-10. CNN: {cnn}."


def peers_by_row(model: ModelName, batch_size: int) -> dict[str, list[Peer]]:
    """Return the peers of each row; of several, the fastest is shown."""
    peer = functools.partial(Peer, model=model, batch_size=batch_size)
    formats = (False, True) if model == "cnn" else (False,)
    pytorch = [peer(loop="pytorch", precision="float32", channels_last=channels_last) for channels_last in formats]
    return {
        LESSON: [peer(loop="lesson", precision="float32")],
        EAGER: pytorch,
        "torch.compile": [dataclasses.replace(eager, compiles=True) for eager in pytorch],
        "PyTorch bfloat16 autocast": [dataclasses.replace(eager, precision="bfloat16") for eager in pytorch],
        "torch.compile, bfloat16 autocast": [
            dataclasses.replace(eager, precision="bfloat16", compiles=True) for eager in pytorch
        ],
        "a bare compiled loop": [peer(loop="bare", precision="float32")],
        **{f"ours, {precision}": [peer(loop="ours", precision=precision)] for precision in PRECISIONS},
        **{
            f"ours, {precision}, native": [peer(loop="ours", precision=precision, processor="native")]
            for precision in PRECISIONS
        },
        **{
            f"ours, float32, {name}": [peer(loop="ours", precision="float32", optimizer=name)]
            for name in (OPTIMIZERS if (model, batch_size) == SETTINGS[0] else ())
        },
    }


def bare_peer(model: ModelName, batch_size: int, precision: Precision) -> Peer:
    """Return the peer of a row of the second table."""
    return Peer(loop="matmuls", model=model, batch_size=batch_size, precision=precision)


def peers_of(setting: tuple[ModelName, int]) -> list[Peer]:
    """Return every peer of a network and batch size, in order."""
    in_rows = itertools.chain(*peers_by_row(*setting).values())
    return [*in_rows, *(bare_peer(*setting, precision) for precision in PRECISIONS)]


def all_peers() -> list[Peer]:
    """Return every peer, in order."""
    return [*itertools.chain.from_iterable(map(peers_of, SETTINGS))]


def run(examples: int, rounds: int, shape: tuple[int, ...] = IMAGE_SHAPE) -> Measurements:
    """Measure all peers of a setting in turn, so many times."""
    found = Measurements(examples=examples, image_shape=shape, seconds={peer: [] for peer in all_peers()}, notes={})
    if importlib.util.find_spec("torch") is None:
        found.notes.update({peer: NO_PYTORCH for peer in found.seconds if peer.loop == "pytorch"})
    with progress_bar("training", (rounds + 1) * len(found.seconds), unit="steps") as bar:
        for setting in SETTINGS:
            _measure([peer for peer in peers_of(setting) if peer not in found.notes], found, rounds, bar)
    return found


def _measure(peers: list[Peer], found: Measurements, rounds: int, bar: Any) -> None:
    workers: dict[Peer, Worker] = {}
    try:
        for peer in peers:
            bar.advance(message=f"{peer.loop}, {peer.model}, batch {peer.batch_size}, {peer.precision}")
            num_examples = _examples_per_round(peer, found.examples)
            task = Task(peer=peer, examples=num_examples, rounds=rounds, image_shape=found.image_shape)
            workers[peer] = Worker("training_peers", task)
        for _ in range(rounds):
            for peer, worker in workers.items():
                if (seconds := worker.ask()) is not None:
                    found.seconds[peer].append(seconds * found.examples / _examples_per_round(peer, found.examples))
                bar.advance()
        found.notes.update({peer: worker.note for peer, worker in workers.items() if worker.note})
    finally:
        for worker in workers.values():
            worker.stop()


def training_rows(found: Measurements) -> list[Row]:
    """Return the rows of the table."""
    rows = []
    for model, batch_size in SETTINGS:
        shown = {name: found.fastest(peers) for name, peers in peers_by_row(model, batch_size).items()}
        for name, peer in shown.items():
            seconds = found.median(peer)
            rows.append(
                Row(
                    model=model,
                    batch_size=batch_size,
                    name=name + _memory_format(peer),
                    note=found.notes.get(peer),
                    seconds_per_epoch=seconds,
                    examples_per_second=_quotient(found.examples, seconds),
                    ratio_to_lesson=_quotient(found.median(shown[LESSON]), seconds),
                    ratio_to_pytorch_eager=_quotient(found.median(shown[EAGER]), seconds),
                    share_of_matmul_rate=_quotient(found.median(bare_peer(model, batch_size, peer.precision)), seconds),
                )
            )
    return rows


def bare_rows(found: Measurements) -> list[BareRow]:
    """Return the rows of the second table."""
    rows = []
    for (model, batch_size), precision in itertools.product(SETTINGS, PRECISIONS):
        seconds = found.median(bare_peer(model, batch_size, precision))
        flops = flops_per_step(model, batch_size, found.image_shape) * found.examples / batch_size
        rows.append(
            BareRow(
                model=model,
                batch_size=batch_size,
                precision=precision,
                seconds_per_epoch=seconds,
                flops_per_second=_quotient(flops, seconds),
            )
        )
    return rows


def machine() -> dict[str, str]:
    """Return the machine and the versions of the measurement."""
    about = environment()
    processor = str(about["processor"].get("name", about["machine"]))
    found = {"processor": processor, "cores": str(available_cores()), "Python": platform.python_version()}
    for package in ("jax", "flax", "optax", "torch"):
        if importlib.util.find_spec(package):
            found[package] = importlib.metadata.version(package)
    return found


def training_table(rows: list[Row], caption: str) -> Table:
    table = Table(title=", ".join(f"{name} {value}" for name, value in machine().items()), caption=caption)
    table.add_column("training")
    for name in (
        "seconds\n/ epoch",
        "examples\n/ second",
        "× the\nlesson",
        "× PyTorch\neager",
        "share of\nmatmul\nrate",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for setting, group in itertools.groupby(rows, key=_setting):
        table.add_section()
        table.add_row(f"[bold]{setting}")
        for row in group:
            table.add_row(*_cells(row))
    return table


def bare_table(rows: list[BareRow]) -> Table:
    table = Table(title="matmuls alone")
    table.add_column("training")
    table.add_column("precision")
    for name in ("seconds\n/ epoch", "GFLOP/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        rate = _quotient(row.flops_per_second, 1e9)
        table.add_row(_setting(row), row.precision, _text(row.seconds_per_epoch, ".3f"), _text(rate, ".0f"))
    return table


def report(found: Measurements, rows: list[Row], bare: list[BareRow], caption: str) -> dict[str, Any]:
    """Return everything as plain data."""
    return {
        "caption": caption,
        "rows": [dataclasses.asdict(row) for row in rows],
        "matmuls_alone": [dataclasses.asdict(row) for row in bare],
        "measured": [
            {**dataclasses.asdict(peer), "seconds_per_epoch": seconds} for peer, seconds in found.seconds.items()
        ],
    }


def _examples_per_round(peer: Peer, examples: int) -> int:
    """Return the examples of a round: whole batches."""
    limit = min(examples, CNN_EXAMPLES) if peer.model == "cnn" else examples
    return limit // peer.batch_size * peer.batch_size


def _memory_format(peer: Peer) -> str:
    if peer.loop != "pytorch" or peer.model != "cnn":
        return ""
    return ", channels_last" if peer.channels_last else ", contiguous"


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def _setting(row: Row | BareRow) -> str:
    return f"{row.model.upper()}, batch {row.batch_size}"


def _cells(row: Row) -> list[str]:
    if row.note:
        return [escape(f"{row.name}: {row.note}")]
    return [
        row.name,
        _text(row.seconds_per_epoch, ".3f"),
        _text(row.examples_per_second, ",.0f"),
        _text(row.ratio_to_lesson, ".2f"),
        _text(row.ratio_to_pytorch_eager, ".2f"),
        _text(row.share_of_matmul_rate, ".0%"),
    ]


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", type=int, default=55_000)
    parser.add_argument("--images", type=image_shape, default=IMAGE_SHAPE, metavar="32x32x3")
    arguments = parser.parse_args()
    largest = max(batch_size for _, batch_size in SETTINGS)
    if arguments.rounds < 1 or arguments.examples < largest:
        parser.error(f"--rounds must be at least 1, --examples at least {largest}")
    found = run(arguments.examples, arguments.rounds, arguments.images)
    rows, bare = training_rows(found), bare_rows(found)
    caption = f"{networks(arguments.images)} Medians; an epoch has {arguments.examples:,} examples"
    if arguments.examples > CNN_EXAMPLES:
        caption += f", a timed round of the CNN {CNN_EXAMPLES:,} of them, scaled"
    console = Console()
    console.print(training_table(rows, caption))
    console.print(bare_table(bare))
    record(f"training{suffix_of(arguments.images)}", report(found, rows, bare, caption), arguments)
    failures = [f"{peer}: {note}" for peer, note in found.notes.items() if note != NO_PYTORCH]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
