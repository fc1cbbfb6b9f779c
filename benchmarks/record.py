"""Writes what a benchmark measured to `benchmarks/results/<benchmark>-<machine>.json`: a file for each kind of machine.

A new run takes the place of the last one on such a machine; commit it to compare machines, or `git restore` it.
"""

import argparse
import contextlib
import datetime
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradtrail.support.git import git
from gradtrail.tracking.environment import environment, machine_key

FOLDER = Path(__file__).with_name("results")
_PEERS = ("equinox", "torch", "opacus", "mlflow", "dvc")


def _path(benchmark: str) -> Path:
    return FOLDER / f"{benchmark}-{machine_key()}.json"


def read_results(benchmark: str) -> dict[str, Any]:
    """Return the results of the last run on such a machine; empty if there was none."""
    path = _path(benchmark)
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}
    return results


def record(benchmark: str, results: Any, options: argparse.Namespace | None = None) -> None:
    """Write results as JSON, with commit, date, load, processor, versions and the benchmark's options."""
    about = environment()
    for package in _PEERS:
        with contextlib.suppress(PackageNotFoundError):
            about["packages"][package] = version(package)
    content = {
        "benchmark": benchmark,
        "commit": git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_averages": os.getloadavg(),
        "environment": about,
        "options": vars(options) if options else {},
        "results": results,
    }
    FOLDER.mkdir(exist_ok=True)
    path = _path(benchmark)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(FOLDER.parents[1])}")
