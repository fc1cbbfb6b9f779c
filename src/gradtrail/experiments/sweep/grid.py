"""`gradtrail sweep FILE`: run a grid or a list of params as DVC experiments, and list the results."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from gradtrail.experiments.sweep.engine import Engine, QueueEngine
from gradtrail.experiments.sweep.main import require_commit, sweep_lock
from gradtrail.experiments.sweep.missing import complete
from gradtrail.experiments.sweep.runs import CompletedRun
from gradtrail.experiments.sweep.spec import STAGE, Comparison, PlannedRun, require_seeds
from gradtrail.stages.common.params import MEMBERS, PARAMS, SEED, read_yaml, require_known, validate
from gradtrail.stages.common.pipeline_file import read_pipeline, stages_before
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import table

_MOST = 10_000  # largest number of experiments: a grid grows fast


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The content of a sweep's file."""

    about: str = ""  # purpose
    set: dict[str, Any] = field(default_factory=dict)  # changes to the params of every experiment, dotted key → value
    grid: dict[str, list[Any]] = field(default_factory=dict)  # key → values; every combination is an experiment
    points: tuple[dict[str, Any], ...] = ()  # changes of further experiments


def read_sweep(path: Path) -> tuple[Comparison, list[PlannedRun]]:
    """Read a sweep: its variants, which are all changes except the seed, and its runs.

    Raises:
        UserError: A key or value is invalid; the message names it.
    """
    sweep = validate(read_yaml(path), Sweep, str(path))
    if empty := next((key for key, values in sweep.grid.items() if not values), None):
        raise UserError(f"{path}: grid.{empty}: has no values")
    combinations = itertools.product(*sweep.grid.values()) if sweep.grid else ()
    points = [dict(zip(sweep.grid, values, strict=True)) for values in itertools.islice(combinations, _MOST + 1)]
    points += sweep.points
    if not 0 < len(points) <= _MOST:
        count = f"more than {_MOST:,}" if points else "no"
        raise UserError(f"{path}: {count} experiments; `grid` and `points` must have 1 to {_MOST:,}")
    _require_valid(path, sweep)
    default = read_yaml(PARAMS)["train"]["seed"]
    seeds = [point.get(SEED, default) for point in points]
    for seed in seeds:
        require_seeds([seed], f"{path}: {SEED}")
    names = _names(points)
    planned = [PlannedRun(_label(point, names), seed) for point, seed in zip(points, seeds, strict=True)]
    variants = {
        run.label: sweep.set | {key: value for key, value in point.items() if key != SEED}
        for run, point in zip(planned, points, strict=True)
    }
    # `timed`: one training per run, as points of a sweep differ in more than seeds
    comparison = Comparison(about=sweep.about, seeds=(default,), variants=variants, timed=True)
    return comparison, list(dict.fromkeys(planned))


def sweep(path: Path, engine: Engine | None = None, *, jobs: int = 1) -> int:
    """Run the missing experiments of a sweep and print its results, the best first.

    Args:
        path: File of the sweep.
        engine: Engine that runs the experiments; None for DVC's queue.
        jobs: Number of experiments that DVC's queue runs in parallel.

    Returns:
        The exit status: 0, 1 if a run failed, or that of `dvc repro` if it failed.

    Raises:
        UserError: The file is invalid, or there is no commit.
    """
    comparison, planned = read_sweep(path)
    require_commit()
    with sweep_lock():
        engine = engine or QueueEngine(jobs)
        if status := engine.prepare(path.stem):
            return status
        completed = complete(path.stem, comparison, planned, engine, str(path))
    if completed:
        stdout_console().print(as_table(completed, f"{path.stem} on {completed[0].dataset}: {comparison.about}"))
    return 1 if len(completed) < len(planned) else 0


def as_table(runs: Sequence[CompletedRun], title: str) -> Table:
    """Return the runs as a table for a terminal, the most accurate first."""
    rows = [
        {
            "params": run.planned.label,
            "seed": str(run.planned.seed),
            "accuracy, %": f"{100 * run.accuracy:.2f}",
            "loss": f"{run.loss:.4f}",
            "train, s": "" if run.seconds is None else f"{run.seconds:.1f}",
            "run": run.run_id[:8],
        }
        for run in sorted(runs, key=lambda run: (-run.accuracy, run.loss, run.planned))
    ]
    return table(title.removesuffix(": "), rows, right=("seed", "accuracy, %", "loss", "train, s"))


def _names(points: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the name of each key in labels: its last part, or all of it if another key has the same last part."""
    last = {key: key.rpartition(".")[2] for point in points for key in point}
    counts = Counter(last.values())
    return {key: name if counts[name] == 1 else key for key, name in last.items()}


def _label(point: Mapping[str, Any], names: Mapping[str, str]) -> str:
    changes = [f"{names[key]}={value}" for key, value in point.items() if key != SEED]
    return ", ".join(changes) or "params.yaml"


def _require_valid(path: Path, sweep: Sweep) -> None:
    params, pipeline = read_yaml(PARAMS), read_pipeline()
    sections = (*stages_before(STAGE, pipeline), STAGE)
    places = {"set": sweep.set, "grid": sweep.grid} | {f"points.{n}": point for n, point in enumerate(sweep.points)}
    for place, changes in places.items():
        require_known(params, changes, f"{path}: {place}")
        for key in changes:
            if key == MEMBERS or (key == SEED and place == "set"):
                raise UserError(f"{path}: {place}.{key}: each experiment trains one seed; list seeds in `grid`")
            if key.partition(".")[0] not in sections:
                raise UserError(f"{path}: {place}.{key} changes neither training nor evaluation")
