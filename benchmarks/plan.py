"""How often the seconds of `gradtrail plan` hold: 40 changes of params, each planned first and then made.

    python -m benchmarks.plan [--limit 40]

In a temporary clone with a store of its own: a history of a few runs, as after some use, then the changes. A change is
planned for the one stage that it affects, which `dvc repro --single-item` then makes; its seconds are those of its last
line. It takes about ten minutes on two cores, and wants the machine to itself. Run `make env` first.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import record

HISTORY = (  # changes of params, and the stages that are made with them
    ("", ("fetch", "preprocess", "train", "evaluate", "export", "gradients", "profile", "report")),
    ("train.epochs=3", ("train", "evaluate", "gradients")),
    ("train.model=cnn train.epochs=1", ("train", "evaluate", "gradients")),
    ("train.precision=bfloat16 train.epochs=2", ("train", "profile")),
    ("evaluate.batch_size=500 gradients.top_fraction=0.02", ("evaluate", "gradients")),
    ("export.batch_sizes=[1,16]", ("export",)),
    ("preprocess.subset_fraction=0.5", ("preprocess",)),
    ("", ("preprocess", "train")),
)
CHANGES = (  # stage and change
    ("train", "train.epochs=1"),
    ("train", "train.epochs=5"),
    ("train", "train.epochs=6 train.seed=3"),
    ("train", "train.epochs=2 train.batch_size=64"),
    ("train", "train.epochs=4 train.batch_size=512"),
    ("train", "train.epochs=3 train.mlp.hidden=[512,256]"),
    ("train", "train.epochs=4 train.mlp.hidden=[64]"),
    ("train", "train.epochs=2 train.mlp.hidden=[512,512,256]"),
    ("train", "train.epochs=3 train.model=linear"),
    ("train", "train.epochs=1 train.model=mixer"),
    ("train", "train.epochs=1 train.model=cnn train.cnn.channels=[8,16]"),
    ("train", "train.epochs=1 train.model=cnn train.precision=bfloat16"),
    ("train", "train.epochs=4 train.precision=bfloat16"),
    ("train", "train.epochs=3 train.optimizer=sgd"),
    ("train", "train.epochs=2 train.optimizer=muon"),
    ("train", "train.epochs=3 train.optimizer=lion"),
    ("train", "train.epochs=2 train.augmentation.shift=2.0"),
    ("train", "train.epochs=2 train.members=2"),
    ("train", "train.epochs=1 train.members=4"),
    ("train", "train.epochs=3 train.average_decay=0.99"),
    ("train", "train.epochs=3 train.mlp.dropout=0.2"),
    ("train", "train.epochs=3 train.schedule=constant train.accumulation_steps=2"),
    ("evaluate", "evaluate.batch_size=250"),
    ("evaluate", "evaluate.calibration_bins=10"),
    ("evaluate", "evaluate.num_mistakes=20"),
    ("export", "export.batch_sizes=[1,8]"),
    ("export", "export.batch_sizes=[1,64,256]"),
    ("gradients", "gradients.top_fraction=0.05"),
    ("gradients", "gradients.num_suspects=20"),
    ("gradients", "gradients.bootstrap_samples=200"),
    ("gradients", "gradients.num_largest=20"),
    ("profile", "profile.seconds=0.3"),
    ("profile", "profile.steps=50"),
    ("profile", "profile.largest_batch_size=512"),
    ("profile", "profile.precisions=[float32]"),
    ("report", "report.title=Another"),
    ("preprocess", "preprocess.subset_fraction=0.2"),
    ("preprocess", "preprocess.label_noise=0.1"),
    ("preprocess", "preprocess.deformations=2"),
    ("fetch", "fetch.dataset=digits"),
)
_PLANNED = re.compile(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)")
_MADE = re.compile(r"^(\w+): .*?([\d.]+) s$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """A change, what was planned for it, and what it took."""

    stage: str
    change: str
    planned: float
    low: float
    high: float
    made: float
    plan_seconds: float  # of the command `gradtrail plan`

    @property
    def is_within(self) -> bool:
        """Whether the interval contains the seconds."""
        return self.low <= self.made <= self.high


class Clone:
    """A clone of the last commit with a store and a cache of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        subprocess.run(["git", "clone", "--quiet", ".", str(folder)], check=True)
        self.env = os.environ | {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(folder / "src")}
        self.env.pop("MLFLOW_TRACKING_URI", None)
        self.params = (folder / "params.yaml").read_text()
        self.made: dict[Path, bytes] = {}  # the lock and the metrics of the committed params

    def run(self, *command: str) -> str:
        """Run a module of Python in the clone and return its output."""
        result = subprocess.run(
            [sys.executable, "-m", *command], cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {result.stdout}{result.stderr}")
        return result.stdout

    def set(self, change: str) -> None:
        """Change the committed params."""
        (self.folder / "params.yaml").write_text(self.params)
        program = (
            "import sys; from dvc.utils.hydra import apply_overrides; apply_overrides('params.yaml', sys.argv[1:])"
        )
        subprocess.run([sys.executable, "-c", program, *change.split()], cwd=self.folder, env=self.env, check=True)

    def restore(self) -> None:
        """Take the outputs of the committed params from the cache, so that a stage reads those of its own params."""
        self.set("")
        for path, content in self.made.items():
            path.write_bytes(content)
        if self.made:
            self.run("dvc", "checkout", "--force", "dvc.yaml")

    def make(self, stage: str) -> float:
        """Make a stage alone, and return its seconds."""
        seconds = dict(_MADE.findall(self.run("dvc", "repro", "--force", "--single-item", stage)))
        return float(seconds[stage])

    def plan(self, stage: str, change: str) -> tuple[float, float, float]:
        """Return the planned seconds of a stage, and both ends of their interval."""
        options = [part for text in change.split() for part in ("-S", text)]
        output = self.run("gradtrail", "plan", *options, stage)
        line = next(line for line in output.splitlines() if line.strip().startswith(f"{stage} "))
        if (match := _PLANNED.search(line)) is None:
            raise SystemExit(f"no seconds in {output}")
        middle, low, high = map(float, match.groups())
        return middle, low, high


def measure(folder: Path, limit: int) -> list[Result]:
    """Make the history, then plan and make each change."""
    clone = Clone(folder)
    for change, stages in HISTORY:
        clone.restore()
        clone.set(change)
        for stage in stages:
            print(f"history: {stage} {change}: {clone.make(stage):.1f} s", flush=True)
        paths = [clone.folder / "dvc.lock", *(clone.folder / "results" / "metrics").iterdir()]
        clone.made = clone.made or {path: path.read_bytes() for path in paths}
    results = []
    for stage, change in CHANGES[:limit]:
        clone.restore()
        began = time.monotonic()
        planned = clone.plan(stage, change)
        took = time.monotonic() - began
        clone.set(change)
        result = Result(stage, change, *planned, clone.make(stage), took)
        print(f"{stage} {change}: {result.planned:.1f} planned, {result.made:.1f} made", flush=True)
        results.append(result)
    return results


def summary(results: list[Result]) -> dict[str, Any]:
    """Return how many intervals hold, how wide they are, and how far the estimates are off."""
    errors = [abs(one.planned / one.made - 1) for one in results]
    return {
        "changes": len(results),
        "within": sum(one.is_within for one in results),
        "largest_half_width": max((one.high - one.low) / 2 / one.planned for one in results),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "median_plan_seconds": statistics.median(one.plan_seconds for one in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=len(CHANGES), help="number of changes, from the first on")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        results = measure(folder / "clone", options.limit)
    finally:
        shutil.rmtree(folder)
    table = Table(title="seconds of a stage: planned, and made")
    for name in ("stage", "change", "planned", "interval", "made", "error", "within"):
        table.add_column(name, justify="left" if name in ("stage", "change") else "right")
    for one in results:
        interval, error = f"{one.low:.1f} to {one.high:.1f}", f"{one.planned / one.made - 1:+.0%}"
        within = "yes" if one.is_within else "no"
        table.add_row(one.stage, one.change, f"{one.planned:.1f}", interval, f"{one.made:.1f}", error, within)
    Console(width=140).print(table)
    totals = summary(results)
    print(f"{totals['within']} of {totals['changes']} within; median error {totals['median_error']:.0%}")
    record("plan", totals | {"changes_made": [asdict(one) for one in results]}, options)


if __name__ == "__main__":
    main()
