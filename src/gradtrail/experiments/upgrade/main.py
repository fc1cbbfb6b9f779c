"""`gradtrail upgrade jax==X`: the effect on programs, times, bits and accuracy, without changing the project."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from gradtrail.experiments.cost_gate import TOLERANCES, as_table, find_changes
from gradtrail.experiments.diff.hlo import read_program
from gradtrail.experiments.timed.checkout import scratch
from gradtrail.experiments.timed.main import Revision, time_revisions
from gradtrail.experiments.upgrade.environment import LOCK, Resolved, install, read_pins, removed_on_failure, resolve
from gradtrail.stages.artifacts.data_files import read_info
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.paths import private_folder
from gradtrail.support.progress import stdout_console
from gradtrail.support.signals import stopping_on_signals
from gradtrail.support.significance import paired_difference

SEEDS = (0, 1, 2)
_SCRIPT = Path(__file__).with_name("rehearsal.py")
_PROGRAMS = "programs"
_DATA = Path("data/processed")
_LONGEST_LINE = 300  # characters


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The results of one environment."""

    folder: Path  # folder of the weights, as `seed-<n>.npz`, and the programs
    costs: Mapping[str, Mapping[str, int]]  # function → metric → value
    accuracies: list[float]  # accuracies on the validation split, by seed
    platform: str  # platform such as `cpu`

    @property
    def programs(self) -> dict[str, str]:
        """Function → digest of its optimized program."""
        above = self.folder / _PROGRAMS
        paths = {str(path.relative_to(above)).removesuffix(".hlo.txt"): path for path in above.rglob("*.hlo.txt")}
        return {name: read_program(path.read_text()).digest for name, path in sorted(paths.items())}


def upgrade(words: tuple[str, ...], *, seconds: float) -> None:
    """Rehearse a change of versions, and print its effects; the project is not changed.

    Args:
        words: Requests of the form `PACKAGE==VERSION`.
        seconds: Budget of the timed comparison.

    Raises:
        UserError: A version does not exist or does not fit, or the project does not run with it.
    """
    pins = read_pins(words)
    read_info(_DATA)  # fails now, not after minutes
    console = stdout_console()
    name = "-".join(f"{package}-{version}" for package, version in sorted(pins.items()))
    with stopping_on_signals("stopped"), removed_on_failure(private_folder() / "upgrade" / name) as folder:
        resolved = resolve(pins, folder)
        for package, (before, after) in resolved.versions.items():
            console.print(f"{package} {before or '(none)'} → {after or '(none)'}")
        python = install(resolved.lock, folder / "venv")
        with scratch() as work:
            sides = [
                _rehearse(label, interpreter, work / letter)
                for label, interpreter, letter in (("now", Path(sys.executable), "A"), (name, python, "B"))
            ]
            if sides[0].platform != sides[1].platform:
                platforms = " and ".join(side.platform for side in sides)
                raise UserError(
                    f"upgrade: the platforms differ ({platforms}); activate an environment built from {LOCK}"
                )
            for line in _describe(console, *sides):
                console.print(line, soft_wrap=True)
            revisions = [
                Revision(name=label, folder=Path(), python=interpreter)
                for label, interpreter in (("now", Path(sys.executable)), (name, python))
            ]
            ratio = time_revisions(*revisions, seconds=seconds, cache=work / "cache")
        console.print(f"time: A is now, B {name}: {ratio.describe()}", soft_wrap=True)
        shutil.rmtree(folder / "venv", ignore_errors=True)
    console.print("\nThe project was not changed. To accept the upgrade:")
    for command in accepting(resolved):
        console.print(f"  {command}", soft_wrap=True)


def accepting(resolved: Resolved) -> Iterator[str]:
    """Yield the commands and edits that accept an upgrade."""
    if resolved.bounds:
        yield f"# in pyproject.toml, change these requirements: {', '.join(resolved.bounds)}"
    yield f"cp {resolved.lock.relative_to(Path.cwd())} {LOCK}"
    yield "make lock  # the locks for GPUs and clusters follow"
    yield "make env"
    yield ".venv/bin/gradtrail versions"
    yield ".venv/bin/gradtrail gate --accept"
    yield ".venv/bin/gradtrail repro"


def _rehearse(name: str, python: Path, folder: Path) -> Rehearsal:
    folder.mkdir()
    env = dict(os.environ) | {"PYTHONPATH": str(Path("src").resolve())}
    command = [str(python), str(_SCRIPT), str(folder), json.dumps(SEEDS)]
    result = subprocess.run(command, env=env, capture_output=True, check=False, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"{name}: the project does not run with it: {one_line(lines[-1])[:_LONGEST_LINE]}")
    return Rehearsal(folder=folder, **json.loads((folder / "result.json").read_text()))


def _describe(console: Console, before: Rehearsal, after: Rehearsal) -> Iterator[str]:
    """Yield the differences, in lines."""
    programs = before.programs, after.programs
    other = [
        name for name in dict.fromkeys([*programs[0], *programs[1]]) if programs[0].get(name) != programs[1].get(name)
    ]
    same = len(programs[0].keys() | programs[1].keys()) - len(other)
    yield f"programs: {len(other)} changed, {same} the same" + (f"; changed: {', '.join(other)}" if other else "")
    if changes := find_changes(before.costs, after.costs, TOLERANCES):
        console.print(as_table(changes))
    else:
        yield "costs: those of all functions within the gate's tolerances"
    yield bits(before.folder, after.folder)
    difference = paired_difference(after.accuracies, before.accuracies)
    yield (
        f"validation accuracy after one epoch, {len(SEEDS)} seeds: {np.mean(before.accuracies):.4f} now, "
        f"difference {difference.mean:+.4f} (95 % interval {difference.low:+.4f} to {difference.high:+.4f})"
    )


def bits(before: Path, after: Path) -> str:
    """Describe whether the weights of both folders have equal bits, or else their largest difference."""
    largest, place, count = -1.0, "", 0
    for seed in SEEDS:
        name = f"seed-{seed}.npz"
        with np.load(before / name) as first, np.load(after / name) as second:
            if {*first} != {*second}:
                return f"weights: other arrays: {', '.join(sorted({*first} ^ {*second}))}"
            for key in first:
                old, new = first[key], second[key]
                if old.dtype != new.dtype or old.shape != new.shape:
                    return f"weights: {key} is {new.dtype}{list(new.shape)}, was {old.dtype}{list(old.shape)}"
                if old.tobytes() != new.tobytes():
                    count += 1
                    distance = float(np.max(np.abs(old.astype(np.float64) - new.astype(np.float64))))
                    if not (distance <= largest or math.isnan(largest)):  # a NaN is the largest
                        largest, place = distance, f"{key}, seed {seed}"
    if not count:
        return f"weights after one epoch: the same bits, for {len(SEEDS)} seeds"
    return f"weights after one epoch: largest difference {largest:.3g} ({place})"
