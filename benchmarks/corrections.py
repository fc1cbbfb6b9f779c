"""Whether looking for wrong labels helps: planted ones are corrected in the order of their suspicion, and trained on.

    python -m benchmarks.corrections [--seeds 2] [--quick]

Of the training labels in `data/processed`, 10 % are made wrong (`audit.noise_rate`), uniformly and as networks confuse
them. Somebody who always knows the right label, an oracle in the place of a person, looks at as many labels as there
are wrong ones, and at more and fewer of them: in the order of the audit's score, in that of the best score of a single
training (one minus the label's mean probability over the training), and at random. Then the network of `params.yaml` is
trained on what became of the labels. Recovered: the share of the test accuracy lost to the noise that comes back.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from gradtrail.core.audit import ensemble, planting
from gradtrail.core.audit.config import AuditConfig
from gradtrail.core.audit.scores import fit_temperature, label_scores
from gradtrail.core.common.split import Split
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import History, on_host
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.audit.tables import choose_score, detection_table
from gradtrail.stages.common import dataset
from gradtrail.stages.common.params import load_section
from gradtrail.support.progress import progress_bar

SHARES = {"audit": (0.5, 0.9, 1.0, 1.05, 1.15, 1.3), "single score": (1.0, 1.15, 1.3), "random": (1.0, 1.3)}
GOAL = 0.95  # of the accuracy lost


class Trainer:
    """Trains the network of `params.yaml` on any labels of the training split, with one compilation."""

    def __init__(self, train: Split, test: Split, num_classes: int, seeds: int):
        config = dataclasses.replace(load_section("train", TrainConfig), keep_epochs=())
        self._config = config
        self._train, self._test, self._seeds = train, test, range(seeds)
        compiler, model = Compiler(time.perf_counter), Model(config.model_config(train.images.shape[1:], num_classes))
        program = loop.make_program(config, model, len(train), jax.local_devices())
        self._engine = loop.compile_engine(program, compiler=compiler)
        predict = inference.compile_predict(model, inference.VALIDATION_BATCH_SIZE, compiler=compiler)
        self._evaluate = functools.partial(inference.validate, predict, images=test.images, labels=test.labels)

    def accuracy(self, labels: np.ndarray) -> float:
        """Return the mean test accuracy over the seeds."""
        return float(
            np.mean([self._evaluate(self.history(labels, seed).final.params)["accuracy"] for seed in self._seeds])
        )

    def history(self, labels: np.ndarray, seed: int = 0) -> History:
        """Return the history of a training."""
        examples = loop.on_device(self._train.images, labels, self._engine.mesh)
        state = self._engine.init(loop.keys_of(dataclasses.replace(self._config, seed=seed).seeds_of(seed)))
        history = History((), on_host(state.params))
        for chunk in loop.train(self._engine, state, examples, steps_per_call=self._engine.steps_per_epoch):
            params = on_host(self._engine.evaluation_params(chunk.state))
            history.add(chunk, params, {"loss": 0.0, "accuracy": 0.0})
        return history


def recovered(trainer: Trainer, true: np.ndarray, given: np.ndarray, orders: Mapping[str, np.ndarray]) -> list[dict]:
    """Return a row for each order of looking at labels, and number of them."""
    is_wrong = given != true
    clean, noisy = trainer.accuracy(true), trainer.accuracy(given)
    rows = [{"order": "none", "looked": 0, "found": 0.0, "accuracy": noisy, "recovered": 0.0}]
    for name, order in orders.items():
        for share in SHARES[name]:
            looked = order[: round(share * is_wrong.sum())]
            labels = given.copy()
            labels[looked] = true[looked]
            accuracy = trainer.accuracy(labels)
            found = float(is_wrong[looked].sum() / is_wrong.sum())
            back = (accuracy - noisy) / (clean - noisy)
            rows.append({"order": name, "looked": share, "found": found, "accuracy": accuracy, "recovered": back})
    rows.append({"order": "all correct", "looked": 0, "found": 1.0, "accuracy": clean, "recovered": 1.0})
    return rows


def run(seeds: int, quick: bool) -> dict[str, list[dict]]:
    """Return the rows of `recovered` for each kind of noise."""
    info = dataset.read_info(Path("data/processed"))
    splits = dataset.read_splits(Path("data/processed"), info)
    train = splits["train"]
    config = dataclasses.replace(load_section("audit", AuditConfig), quick=quick).effective
    model = Model(config.train_config().model_config(info.image_shape, info.num_classes))
    judges = ensemble.compile_judges(model, config, len(train), compiler=Compiler(time.perf_counter))
    visits = planting.num_visits_of_audit({"train": train}, config)
    with progress_bar("audit", visits, unit="steps") as bar:
        _, planted = planting.judge_all(judges, {"train": train}, config, steps_per_call=100, advance=bar.advance)
    chosen = choose_score(detection_table(planted))
    trainer = Trainer(train, splits["test"], info.num_classes, seeds)
    found = {}
    for kind, one in planted.items():
        logits = one.judgement.logits
        score = label_scores(logits, one.labels, fit_temperature(logits, one.labels))[chosen]
        dynamics = trainer.history(one.labels).dynamics
        alone = 1 - dynamics.mean_probability
        orders = {
            "audit": np.argsort(-score, kind="stable"),
            "single score": np.argsort(-alone, kind="stable"),
            "random": np.random.default_rng(0).permutation(len(train)),
        }
        found[kind] = recovered(trainer, train.labels, one.labels, orders)
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
    parser.add_argument("--seeds", type=int, default=2)
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


if __name__ == "__main__":
    main()
