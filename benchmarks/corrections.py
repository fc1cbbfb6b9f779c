"""Whether looking for wrong labels helps: planted ones are corrected in the order of their suspicion, and trained on.

    python -m benchmarks.corrections [--seeds 5] [--quick]

Of the training labels in `data/processed`, 10 % are made wrong (`audit.noise_rate`), uniformly and as networks confuse
them. Somebody who always knows the right label, an oracle in the place of a person, looks at as many labels as there
are wrong ones, and at more and fewer of them: in the order of the audit's score, in that of the best score of a single
training (one minus the label's mean probability over the training), and at random. Then the network of `params.yaml` is
trained on what became of the labels. Recovered: the share of the test accuracy lost to the noise that comes back.
"""

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from benchmarks.relabelled import Trainer
from gradtrail.core.audit.labels import fit_temperature, label_scores
from gradtrail.core.audit.networks import AuditConfig, CrossValidation
from gradtrail.core.nn.models import Model
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.artifacts import data_files
from gradtrail.stages.artifacts.data_files import read_splits
from gradtrail.stages.audit import choose_score, detection_table
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_up_jax
from gradtrail.stages.common.params import load_section
from gradtrail.support.progress import progress_bar

SHARES = {"audit": (0.5, 0.9, 1.0, 1.05, 1.15, 1.3), "single score": (1.0, 1.15, 1.3), "random": (1.0, 1.3)}
GOAL = 0.95  # of the accuracy lost


def recovered(
    accuracy_of: Callable[[np.ndarray], float], true: np.ndarray, given: np.ndarray, orders: Mapping[str, np.ndarray]
) -> list[dict]:
    """Return a row for each order of looking at labels, and number of them."""
    is_wrong = given != true
    clean, noisy = accuracy_of(true), accuracy_of(given)
    rows = [{"order": "none", "looked": 0, "found": 0.0, "accuracy": noisy, "recovered": 0.0}]
    for name, order in orders.items():
        for share in SHARES[name]:
            looked = order[: round(share * is_wrong.sum())]
            labels = given.copy()
            labels[looked] = true[looked]
            accuracy = accuracy_of(labels)
            found = float(is_wrong[looked].sum() / is_wrong.sum())
            back = (accuracy - noisy) / (clean - noisy) if clean > noisy else math.nan
            rows.append({"order": name, "looked": share, "found": found, "accuracy": accuracy, "recovered": back})
    rows.append({"order": "all correct", "looked": 0, "found": 1.0, "accuracy": clean, "recovered": 1.0})
    return rows


def run(seeds: int, quick: bool) -> dict[str, list[dict]]:
    """Return the rows of `recovered` for each kind of noise."""
    set_up_jax(load_section("environment", EnvironmentConfig), load_section("runtime", RuntimeConfig))
    info = data_files.read_info(Path("data/processed"))
    splits = read_splits(Path("data/processed"))
    train = splits["train"]
    config = dataclasses.replace(load_section("audit", AuditConfig), quick=quick)
    model = Model(config.train_config().model_config(info.image_shape, info.num_classes))
    networks = CrossValidation(model, config, len(train), compiler=Compiler(time.perf_counter))
    with progress_bar("audit", config.num_epochs, unit="steps") as bar:
        _, planted = networks.run({"train": train}, advance=bar.advance)
    chosen = choose_score(detection_table(planted, train.labels))
    trainer = Trainer(
        dataclasses.replace(load_section("train", TrainConfig), privacy=NOT_PRIVATE), train, info.num_classes
    )

    def accuracy_of(labels: np.ndarray) -> float:
        said = [trainer.logits(trainer.history(labels, seed), splits["test"]) for seed in range(seeds)]
        return float(np.mean([np.mean(each.argmax(axis=1) == splits["test"].labels) for each in said]))

    found = {}
    for kind, one in planted.items():
        score = label_scores(one.logits, one.labels, fit_temperature(one))[chosen]
        alone = 1 - trainer.history(one.labels, 0).dynamics.mean_probability
        orders = {
            "audit": np.argsort(-score, kind="stable"),
            "single score": np.argsort(-alone, kind="stable"),
            "random": np.random.default_rng(0).permutation(len(train)),
        }
        found[kind] = recovered(accuracy_of, train.labels, one.labels, orders)
    return found


def as_table(kind: str, rows: Sequence[dict]) -> Table:
    """Return the rows as a table."""
    table = Table(title=f"{kind} noise")
    for column in ("labels in the order of", "looked at / wrong", "wrong ones found", "test accuracy", "recovered"):
        table.add_column(column)
    for row in rows:
        looked = f"{row['looked']:.2f}" if row["looked"] else ""
        numbers = (f"{row['found']:.1%}", f"{row['accuracy']:.2%}", f"{row['recovered']:.1%}")
        table.add_row(row["order"], looked, *numbers)
    return table


def needed(rows: Sequence[dict], order: str) -> float | None:
    """Return how many labels, as a multiple of the wrong ones, bring back 95 %, between the measured points."""
    points = [(0.0, 0.0), *((row["looked"], row["recovered"]) for row in rows if row["order"] == order)]
    for (low, before), (high, after) in itertools.pairwise(points):
        if after >= GOAL:
            return low + (high - low) * (GOAL - before) / (after - before)
    return None


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of the audit")
    options = parser.parse_args()
    found = run(options.seeds, options.quick)
    console = Console()
    for kind, rows in found.items():
        console.print(as_table(kind, rows))
        for order in SHARES:
            many = needed(rows, order)
            said = f"{many:.2f} × the wrong labels" if many else f"more than {SHARES[order][-1]:.2f} × the wrong labels"
            console.print(f"{order}: {GOAL:.0%} recovered after {said}")
    record("corrections", found, options)


if __name__ == "__main__":
    main()
