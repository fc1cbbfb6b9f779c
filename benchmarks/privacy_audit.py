"""Whether a privacy audit tells a faultless private training from faulty ones.

    python -m benchmarks.privacy_audit [--trainings 40] [--epsilon 3]

Softmax regression on 5,000 examples of `data/processed` and 1,000 canaries, of which fair coins put half into the
training set. Faultless trainings, each audited by itself: at 95 % confidence the lower bound may be above the
accountant's epsilon in one of twenty. Then the faults of `benchmarks/planted_faults.py`, one training each.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.planted_faults import FAULTS, planted
from benchmarks.record import record
from gradtrail.core.data import Split
from gradtrail.core.nn.losses import CROSS_ENTROPY
from gradtrail.core.nn.mlp import Linear
from gradtrail.core.nn.models import Model
from gradtrail.core.privacy_audit import AuditedTraining, PrivacyAuditConfig, draw_canaries
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.optimizers import SGD
from gradtrail.core.train.schedules import Constant
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_up_jax
from gradtrail.stages.common.params import load_section
from gradtrail.stages.data import data_files
from gradtrail.stages.dp import accounting
from gradtrail.stages.privacy_audit import Audit, audit, gaussian_bound, guess

EXAMPLES, CANARIES, BATCH_SIZE, EPOCHS = 5000, 1000, 500, 10
DELTA = 1e-5


def private_config(epsilon: float) -> TrainConfig:
    """Return the training of `params.yaml` as softmax regression by plain SGD, made private."""
    config = load_section("train", TrainConfig)
    privacy = dataclasses.replace(
        config.privacy, enabled=True, epsilon=epsilon, noise_multiplier=None, delta=DELTA, release=False
    )
    return dataclasses.replace(
        config,
        model=Linear(),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        optimizer=SGD(learning_rate=0.5, momentum=0.0, nesterov=False),
        schedule=Constant(warmup_fraction=0.0),
        clip_norm=None,
        loss=CROSS_ENTROPY,
        privacy=privacy,
    )


def first_examples(folder: Path) -> tuple[Split, int]:
    """Return the first training examples, and the number of classes."""
    info = data_files.read_info(folder)
    train = data_files.read_split(folder / "train")
    columns = {name: column[:EXAMPLES] for name, column in vars(train).items()}
    return Split(**columns), info.num_classes


class Auditor:
    """Audits trainings on one split.

    Args:
        epsilon: that each training claims.
        train: the training split.
        num_classes: of it.
    """

    def __init__(self, epsilon: float, train: Split, num_classes: int):
        self._train, self._config = train, private_config(epsilon)
        self._audit = PrivacyAuditConfig(seed=0, trainings=1, num_canaries=CANARIES, guess_share=0.1, confidence=0.95)
        self._canaries = draw_canaries(self._audit, train, num_classes)
        self._model = Model(self._config.model_config(train.images.shape[1:], num_classes))
        slots = len(train) + CANARIES
        rate, steps = BATCH_SIZE / slots, EPOCHS * -(-slots // BATCH_SIZE)
        self.noise = accounting.find_noise(epsilon, DELTA, rate=rate, steps=steps)
        self.epsilon = accounting.Steps(rate=rate, noise_multiplier=self.noise, number=steps).epsilon(DELTA)

    def compile(self) -> AuditedTraining:
        """Compile a training with the engine as it is now."""
        compiler = Compiler(time.perf_counter)
        return AuditedTraining(self._config, self._model, len(self._train), CANARIES, self.noise, compiler=compiler)

    def audits(self, watched: AuditedTraining, trainings: int) -> Iterator[Audit]:
        """Yield the audit of each of so many trainings."""
        for seed in range(trainings):
            config = dataclasses.replace(self._audit, seed=seed)
            yield audit(config, watched, self._train, self._canaries, epsilon=self.epsilon, delta=DELTA)


def together(audits: list[Audit]) -> float:
    """Return the lower bound from the canaries of all trainings."""
    scores, coins = (np.concatenate([getattr(one, name) for one in audits]) for name in ("scores", "coins"))
    return gaussian_bound(guess(scores, coins, 0.1), delta=DELTA, significance=0.05)


def main() -> None:
    """Audit faultless trainings and faulty ones, print a table and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=40, help="faultless ones")
    parser.add_argument("--epsilon", type=float, default=3.0, help="of each training")
    options = parser.parse_args()
    set_up_jax(load_section("environment", EnvironmentConfig), load_section("runtime", RuntimeConfig))
    auditor = Auditor(options.epsilon, *first_examples(Path("data/processed")))
    clean = list(auditor.audits(auditor.compile(), options.trainings))
    bounds = np.array([one.lower_bound for one in clean])
    results: dict = {
        "epsilon": auditor.epsilon,
        "noise_multiplier": auditor.noise,
        "lower_bounds": bounds.tolist(),
        "above": int(np.sum(bounds > auditor.epsilon)),
        "together": together(clean),
        "faults": {},
    }
    table = Table("training", "lower bound of ε", "above ε", title=f"Accountant's ε {auditor.epsilon:.2f}")
    spread = f"{bounds.mean():.2f} ± {bounds.std():.2f}, at most {bounds.max():.2f}"
    table.add_row(f"faultless, {len(bounds)} trainings", spread, f"{results['above']} of {len(bounds)}")
    table.add_row("the same, their canaries together", f"{results['together']:.2f}", "")
    for fault in FAULTS:
        with planted(fault):
            watched = auditor.compile()
        (found,) = auditor.audits(watched, 1)
        results["faults"][fault] = {"lower_bound": found.lower_bound}
        table.add_row(fault, f"{found.lower_bound:.2f}", str(found.lower_bound > found.epsilon))
    Console().print(table)
    record("privacy_audit", results, options)


if __name__ == "__main__":
    main()
