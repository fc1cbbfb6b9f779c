"""What label smoothing does, on the validation split: accuracy, calibrated probabilities, and what finds wrong labels.

    python -m benchmarks.smoothing [--seeds 20] [--noisy-seeds 5]

Trains the network of `params.yaml` with each smoothing, over the same seeds. The calibrated cross-entropy is that of
each half of the validation split at the temperature that was fitted on the other half, so no example counts for itself.
Rankings: average precision of finding uniform wrong labels, 10 % of the training labels, by one minus the label's mean
probability over the training. Intervals are those of the difference to the first smoothing, paired by seed.
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.metrics import average_precision_score

from benchmarks.record import record
from benchmarks.relabelled import Trainer
from gradtrail.core.audit.labels import draw_uniform, plant
from gradtrail.core.data import Split
from gradtrail.core.evaluate import fit_temperature, log_softmax
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.stages.artifacts import data_files
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_up_jax
from gradtrail.stages.common.params import load_section
from gradtrail.support.progress import progress_bar
from gradtrail.support.significance import paired_difference

SMOOTHINGS = (0.1, 0.05, 0.0)
NOISE = 0.1
COLUMNS = {
    "accuracy": "accuracy, %",
    "loss": "calibrated cross-entropy",
    "ranking": "average precision of wrong labels",
}


def calibrated_loss(logits: np.ndarray, split: Split) -> float:
    """Return the mean cross-entropy of each half at the temperature of the other, in nats."""
    halves = (np.arange(len(split)) % 2 == 0, np.arange(len(split)) % 2 == 1)
    losses = []
    for half, other in (halves, halves[::-1]):
        temperature = fit_temperature(logits[other], split.labels[other])
        logs = log_softmax(logits[half].astype(np.float64) / temperature)
        losses.append(-logs[np.arange(len(logs)), split.labels[half]])
    return float(np.mean(np.concatenate(losses)))


def run(seeds: int, noisy_seeds: int) -> dict[str, dict[str, list[float]]]:
    """Return smoothing → column → value of each seed."""
    set_up_jax(load_section("environment", EnvironmentConfig), load_section("runtime", RuntimeConfig))
    info = data_files.read_info(Path("data/processed"))
    train, validation = (data_files.read_split(Path(f"data/processed/{name}")) for name in data_files.SPLITS[:2])
    noisy = plant(train.labels, draw_uniform(train.labels, info.num_classes, seed=0), NOISE, seed=1)
    found = {}
    with progress_bar("smoothing", len(SMOOTHINGS) * (seeds + noisy_seeds), unit="steps") as bar:
        for smoothing in SMOOTHINGS:
            config = dataclasses.replace(
                load_section("train", TrainConfig), label_smoothing=smoothing, privacy=NOT_PRIVATE
            )
            trainer = Trainer(config, train, info.num_classes)
            columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
            for seed in range(seeds):
                logits = trainer.logits(trainer.history(train.labels, seed), validation)
                columns["accuracy"].append(100 * float(np.mean(logits.argmax(axis=1) == validation.labels)))
                columns["loss"].append(calibrated_loss(logits, validation))
                bar.advance(1)
            for seed in range(noisy_seeds):
                dynamics = trainer.history(noisy, seed).dynamics
                columns["ranking"].append(
                    float(average_precision_score(noisy != train.labels, 1 - dynamics.mean_probability))
                )
                bar.advance(1)
            found[f"{smoothing:g}"] = columns
    return found


def as_table(found: dict[str, dict[str, list[float]]]) -> Table:
    """Return mean ± standard deviation of each column, and the difference to the first row with its interval."""
    table, first = Table(title="label smoothing, validation split"), next(iter(found.values()))
    for column in ("smoothing", *COLUMNS.values()):
        table.add_column(column)
    for smoothing, columns in found.items():
        cells = []
        for name, values in columns.items():
            digits = 2 if name == "accuracy" else 4
            cell = f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
            if columns is not first:
                of = paired_difference(values, first[name], num_comparisons=len(found) - 1)
                cell += f" ({of.mean:+.{digits}f}, {of.low:+.{digits}f} to {of.high:+.{digits}f})"
            cells.append(cell)
        table.add_row(smoothing, *cells)
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--noisy-seeds", type=int, default=5)
    options = parser.parse_args()
    found = run(options.seeds, options.noisy_seeds)
    Console().print(as_table(found))
    record("smoothing", found, options)


if __name__ == "__main__":
    main()
