"""Memory of a training on more data than memory holds: peaks over copies of the training digits.

    python -m benchmarks.streaming [--copies 1,9,27] [--model mlp]

The stage `train` by `params.yaml`, but for one epoch and no tracking, in a folder of its own, whose training split has
so many copies of each digit of `data/processed`. Peaks are of the memory that is not mapped from files. It takes 1 KB
an example of disk, and needs Linux.
"""

import argparse
import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from benchmarks.record import record
from gradtrail.stages.data.data_files import read_info, read_splits, write_processed

ROOT = Path(__file__).parents[1]
COPIED = ("dvc.yaml", "pipeline", "src", "pyproject.toml")
DATA = Path("data/processed")


def make_project(folder: Path, model: str) -> None:
    """Copy the stages and their params to an empty folder."""
    for name in COPIED:
        source = ROOT / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder / name)
    yaml = YAML()
    params = yaml.load(ROOT / "params.yaml")
    params["train"] |= {"epochs": 1, "keep_epochs": [], "model": model}
    params["runtime"] |= {"tracking": False, "system_metrics": False}
    yaml.dump(params, folder / "params.yaml")


def write_copies(folder: Path, copies: int) -> int:
    """Write the splits with so many copies of the training split; return its number of examples."""
    splits = read_splits(ROOT / DATA)
    train = vars(splits["train"])
    repeated = {name: np.concatenate([column] * copies) for name, column in train.items() if column is not None}
    repeated["example_id"] = np.arange(len(repeated["example_id"]))
    splits["train"] = dataclasses.replace(splits["train"], **repeated)
    shutil.rmtree(folder / DATA, ignore_errors=True)
    write_processed(folder / DATA, splits, read_info(ROOT / DATA))
    return len(splits["train"])


def train(folder: Path) -> dict[str, float]:
    """Run the stage; return its seconds and the peak of its memory."""
    env = os.environ | {"PYTHONPATH": str(folder / "src")}
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "pipeline.train"]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.05)
        log.seek(0)
        if process.returncode:
            raise SystemExit(f"train ended with {process.returncode}:\n{log.read()}")
    return {"train_seconds": time.perf_counter() - started, "train_peak_mib": peak / 2**20}


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process that is not mapped from files; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", default="1,9,27", help="of each digit; each is measured by itself")
    parser.add_argument("--model", default="mlp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_project(folder, options.model)
        rows = [
            {"copies": copies, "examples": write_copies(folder, copies), **train(folder)}
            for copies in map(int, options.copies.split(","))
        ]
    table = Table("copies", "examples", "seconds of train", "peak MiB of train")
    for row in rows:
        seconds, peak = f"{row['train_seconds']:,.1f}", f"{row['train_peak_mib']:,.0f}"
        table.add_row(str(row["copies"]), f"{row['examples']:,}", seconds, peak)
    Console().print(table)
    record("streaming", {"rows": rows}, options)


if __name__ == "__main__":
    main()
