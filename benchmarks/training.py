"""What training costs: the lesson's loop, PyTorch and this project, on one processor, in one table.

    python -m benchmarks.training [--rounds 5] [--json FILE] [--examples 55000]

All train the same networks with Adam at a constant rate, without clipping, smoothing or augmentation, on the same uint8
images and labels drawn from a fixed seed, in shuffled whole batches. Each row is a process of its own, since the thread
pools of two libraries disturb each other. All rows are measured in turn, several times over, so that the drift of a
shared machine hits all alike; each process has one round of warm-up. The figures are medians over all timed rounds. A
round is an epoch; of the convolutional network, a part of one, scaled.

"Share of matmul rate" is FLOP/s achieved over FLOP/s of the bare matrix products. The FLOPs are those of the network's
matrix products in a step, forward and backward: 2 × rows × inner × columns each, convolutions as products of kernel and
patches, without the gradient of the images. The bare products are the same shapes in JAX at the same precision and with
float32 sums, each in its faster orientation and with nothing else to do, measured in the same run: the second table. As
the FLOPs are the same, the share is the time of these products over the time of training; it can exceed 100 % where a
peer has faster kernels than JAX.

PyTorch is optional: `pip install torch`.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.training_tasks import ModelName, Peer, Precision, Task, available_cores, flops_per_step
from gradtrail.io.progress import progress_bar

PASSES = 3
CNN_EXAMPLES = 2_560  # in a round
SETTINGS: tuple[tuple[ModelName, int], ...] = (("mlp", 128), ("mlp", 512), ("cnn", 128))
MODELS = {"mlp": "MLP 784-256-128-10", "cnn": "CNN 3×3×32, pool, 3×3×64, pool, 128, 10"}
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
LESSON, EAGER = "the lesson's loop", "PyTorch eager, fused Adam"
NO_PYTORCH = "PyTorch is not installed: pip install torch"

Rounds = dict[Peer, list[float]]
Notes = dict[Peer, str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table; figures are None where there was nothing to measure or to compare with.

    Attributes:
        note: in place of figures.
        round_seconds: of every timed round, scaled to an epoch.
    """

    model: ModelName
    batch_size: int
    name: str
    note: str | None = None
    seconds_per_epoch: float | None = None
    examples_per_second: float | None = None
    ratio_to_lesson: float | None = None
    ratio_to_pytorch_eager: float | None = None
    share_of_matmul_rate: float | None = None
    round_seconds: list[float] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BareMatmuls:
    """The matrix products of an epoch with nothing else to do."""

    model: ModelName
    batch_size: int
    precision: Precision
    seconds_per_epoch: float
    flops_per_second: float
    round_seconds: list[float]


def peers_by_row(model: ModelName, batch_size: int) -> dict[str, list[Peer]]:
    """Return the peers of each row; of several, the fastest stands in the table."""
    peer = functools.partial(Peer, model=model, batch_size=batch_size)

    def pytorch(precision: Precision, *, compiles: bool = False) -> list[Peer]:
        formats = (False, True) if model == "cnn" else (False,)
        new = functools.partial(peer, loop="pytorch", precision=precision, compiles=compiles)
        return [new(channels_last=channels_last) for channels_last in formats]

    return {
        LESSON: [peer(loop="lesson", precision="float32")],
        EAGER: pytorch("float32"),
        "torch.compile": pytorch("float32", compiles=True),
        "PyTorch bfloat16 autocast": pytorch("bfloat16"),
        **{f"ours, {precision}": [peer(loop="ours", precision=precision)] for precision in PRECISIONS},
    }


def bare_peer(model: ModelName, batch_size: int, precision: Precision) -> Peer:
    return Peer(loop="matmuls", model=model, batch_size=batch_size, precision=precision)


def all_peers() -> list[Peer]:
    """Return every process of a pass, in order."""
    return [
        peer
        for setting in SETTINGS
        for peers in [*peers_by_row(*setting).values(), [bare_peer(*setting, precision) for precision in PRECISIONS]]
        for peer in peers
    ]


def examples_per_round(peer: Peer, examples: int) -> int:
    """Return the examples of a round: whole batches."""
    limit = min(examples, CNN_EXAMPLES) if peer.model == "cnn" else examples
    return limit // peer.batch_size * peer.batch_size


def measure(task: Task) -> list[float]:
    """Run a task in a process of its own; return the seconds of each round.

    Raises:
        RuntimeError: the last line of what the process said when it failed.
    """
    command = [sys.executable, "-m", "benchmarks.training_peers", json.dumps(dataclasses.asdict(task))]
    done = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"ended with status {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def run(examples: int, rounds: int) -> tuple[Rounds, Notes]:
    """Measure every peer in each pass; return the seconds of its rounds, scaled to an epoch, or why there are none."""
    peers = all_peers()
    measured: Rounds = {peer: [] for peer in peers}
    notes: Notes = {}
    if importlib.util.find_spec("torch") is None:
        notes = {peer: NO_PYTORCH for peer in peers if peer.loop == "pytorch"}
    with progress_bar("training", PASSES * len(peers), unit="steps") as bar:
        for peer in peers * PASSES:
            bar.advance(0, message=f"{peer.loop}, {peer.model}, batch {peer.batch_size}, {peer.precision}")
            if peer not in notes:
                size = examples_per_round(peer, examples)
                try:
                    seconds = measure(Task(peer=peer, examples=size, rounds=math.ceil(rounds / PASSES)))
                    measured[peer] += [examples / size * second for second in seconds]
                except RuntimeError as error:
                    notes[peer] = str(error)
            bar.advance()
    return measured, notes


def bare_matmuls(measured: Rounds, notes: Notes, examples: int) -> list[BareMatmuls]:
    """Return the second table."""
    table = []
    for model, batch_size in SETTINGS:
        flops = flops_per_step(model, batch_size) * examples / batch_size
        for precision in PRECISIONS:
            peer = bare_peer(model, batch_size, precision)
            if peer in notes:
                raise SystemExit(f"{peer}: {notes[peer]}")
            seconds = statistics.median(measured[peer])
            table.append(
                BareMatmuls(
                    model=model,
                    batch_size=batch_size,
                    precision=precision,
                    seconds_per_epoch=seconds,
                    flops_per_second=flops / seconds,
                    round_seconds=measured[peer],
                )
            )
    return table
