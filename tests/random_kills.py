"""Kills trainings at random moments and looks whether they end with the bytes of one that was not killed.

    python tests/random_kills.py [--kills 50] [--seed N]

Three kinds of training on the real digits, in copies of this repository in a temporary folder. Prints the seed, with
which the same moments are drawn again, and ends with status 1 at the first difference. Part of the nightly tests.
"""

import argparse
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from projects import Project, copy_project, stop  # noqa: E402 - of the tests

OUTS = ("models", "results/train", "results/metrics/train.json")
QUICK = {
    "fetch.dataset": "digits",
    "train.epochs": 4,
    "train.batch_size": 8,
    "train.mlp.hidden": [16],
    "train.keep_epochs": [0, 2],
    "runtime.checkpoint_seconds": 0.001,
    "runtime.steps_per_call": 1,
    "runtime.system_metrics": False,
}
KINDS = {
    "mlp with dropout and augmentation": {
        "train.mlp.dropout": 0.2,
        "train.augmentation.shift": 1.0,
        "train.augmentation.rotation": 10.0,
    },
    "cnn in float16": {
        "train.model": "cnn",
        "train.cnn.channels": [4, 8],
        "train.cnn.hidden": [16],
        "train.precision": "float16",
    },
    "schedule-free": {"train.optimizer": "schedule_free"},
}


def prepare(folder: Path, params: dict[str, object]) -> Project:
    """Copy the repository and prepare the data of a kind of training."""
    project = copy_project(folder)
    for key, value in (QUICK | params).items():
        project.set(key, value)
    project.dvc("repro", "preprocess")
    return project


def kill_some(project: Project, kills: int, rng: np.random.Generator) -> str:
    """Kill a training some times, now and then several times in a row; return what came out otherwise."""
    project.run_stage("train")
    expected, started = project.digests(*OUTS), time.monotonic()
    project.run_stage("train")
    whole = time.monotonic() - started
    for kill in range(1, kills + 1):
        share, is_last = rng.uniform(0, 1), rng.uniform() < 0.5 or kill == kills
        at = time.monotonic() + share * whole
        stop(project.start_stage("train"), signal.SIGKILL, when=lambda at=at: time.monotonic() >= at)
        print(f"  kill {kill} after {share:.0%} of {whole:.1f} s", flush=True)
        if is_last:  # else the next kill hits the same training
            said = project.run_stage("train")
            if (found := project.digests(*OUTS)) != expected:
                return f"{found}, not {expected}\n{said}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="in all (default: 50)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the moments (default: random)")
    options = parser.parse_args()
    print(f"seed {options.seed}; to draw the same moments: --kills {options.kills} --seed {options.seed}", flush=True)
    rng = np.random.default_rng(options.seed)
    for (name, params), share in zip(KINDS.items(), np.array_split(np.arange(options.kills), len(KINDS)), strict=True):
        if not len(share):
            continue
        print(f"{name}: {len(share)} kills", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if difference := kill_some(prepare(Path(folder) / "project", params), len(share), rng):
                print(f"other bytes: {difference}", file=sys.stderr)
                return 1
    print("no byte changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
