"""`gradtrail compare`: list the entries of `experiments.yaml`, run what one of them lacks, and report the results.

The runs are DVC experiments, made by an engine: DVC's queue (`queue.py`), or a Ray cluster (`cluster/engine.py`).
Consecutive seeds are the members of one training, in one process.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from gradtrail.experiments.compare.plan import CompletedRun, Planner, read_store
from gradtrail.experiments.compare.report import as_markdown, print_table
from gradtrail.experiments.compare.spec import SEARCH, STAGE, Comparison, Training, read_entries, with_seeds
from gradtrail.experiments.compare.statistics import Summary, summarize
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import PARAMS, changed, read_yaml, validate
from gradtrail.support.errors import UserError
from gradtrail.support.git import head_commit
from gradtrail.support.paths import private_folder
from gradtrail.tracking.sync import sync

_REPORTS = Path("results/comparisons")
_MOST_LABELS = 8  # more variants are listed by their number


class Engine(Protocol):
    """Runs experiments, given as label → changes to the params (dotted key → value)."""

    def prepare(self, title: str) -> int:
        """Prepare to run experiments; return an exit status, or raise UserError."""
        ...

    def run(
        self, title: str, planned: Mapping[str, Mapping[str, Any]], missing: Mapping[str, Mapping[str, Any]], stage: str
    ) -> dict[str, str]:
        """Run the missing ones of the planned experiments up to a stage; return the reason of each failure."""
        ...


def list_entries() -> None:
    """Print each entry, what is there of it, and what the rest would take."""
    planner = _synced_planner()
    for name, entry in read_entries().items():
        if isinstance(entry, Comparison):
            print(f"{name}: {entry.about}\n    {_describe(entry, planner)}")
        else:
            print(f"{name}: {entry.get('about', '')}\n    {SEARCH}: {entry[SEARCH]}")


def print_results(seeds: Sequence[int] | None, *, markdown: bool) -> None:
    """Print the results that are there: a table for each comparison, and one for all entries of one variant."""
    planner = _synced_planner()
    singles: list[CompletedRun] = []
    for entry in read_entries().values():
        if isinstance(entry, Comparison):
            completed = planner.completed(with_seeds(entry, seeds))
            if entry.baseline is not None:
                _print(entry, completed, markdown=markdown)
            else:
                title = f"`{entry.name}`: {entry.about}"
                singles += [dataclasses.replace(run, variant=title) for run in completed]
    _print(Comparison(name="entries of one variant"), singles, markdown=markdown)


def compare(comparison: Comparison, engine: Engine, seeds: Sequence[int] | None = None, *, markdown: bool) -> int:
    """Run the missing trainings of a comparison, print its table, and write it to `results/comparisons/`.

    Returns the exit status: 0, 1 if a run failed, or that of `dvc repro` if it failed.
    """
    comparison = with_seeds(comparison, seeds)
    planner = _synced_planner()
    completed = planner.completed(comparison)
    failed: dict[str, str] = {}
    if missing := planner.trainings(comparison, completed):
        _require_valid(missing, comparison)
        with comparison_lock():
            if status := engine.prepare(comparison.name):
                return status
            planner = _synced_planner()  # earlier experiments and `dvc repro` may have made some
            if missing := planner.trainings(comparison, planner.completed(comparison)):
                planned = _changes(planner.trainings(comparison), comparison)
                failed = engine.run(comparison.name, planned, _changes(missing, comparison), STAGE)
                planner = _synced_planner()
        completed = planner.completed(comparison)
        missing = planner.trainings(comparison, completed)
    for label in map(str, missing):
        print(f"{label}: {f'failed; {failed[label]}' if label in failed else 'has no run in MLflow'}", file=sys.stderr)
    if completed:
        _write(comparison, completed)
        _print(comparison, completed, markdown=markdown)
    return 1 if missing else 0


@contextlib.contextmanager
def comparison_lock() -> Iterator[None]:
    """Hold the lock of commands that run experiments, so that two of them do not run the same.

    Raises:
        UserError: There is no commit from which experiments could start.
    """
    if not head_commit():
        raise UserError("a comparison runs DVC experiments, which need a git repository with a commit")
    lock = FileLock(private_folder() / "compare.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("compare: waiting for another comparison to end", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _synced_planner() -> Planner:
    """Return the planner of a store that has all runs: DVC may have restored outputs without a run in MLflow."""
    sync()
    return read_store()


def _require_valid(trainings: Sequence[Training], comparison: Comparison) -> None:
    """Refuse params that a stage would refuse, before any experiment starts."""
    from gradtrail.experiments.sections import SECTIONS  # late: the configs import JAX

    params, configs = read_yaml(PARAMS), SECTIONS
    for training in trainings:
        changed_params = changed(params, training.changes(comparison))
        for section, config in configs.items():
            validate(changed_params.get(section), config, f"{comparison.name}: {training.variant}: {section}")


def _describe(comparison: Comparison, planner: Planner) -> str:
    """Return how many runs are complete, and what the others would take."""
    completed, count = planner.completed(comparison), len(comparison.variants)
    variants = ", ".join(comparison.variants) if count <= _MOST_LABELS else f"{count} variants"
    text = f"{variants}: {len(completed)} of {len(comparison.runs)} runs done"
    trainings = planner.trainings(comparison, completed)
    if not trainings:
        return text
    times = [planner.seconds(training, comparison) for training in trainings]
    estimates = [seconds for seconds in times if seconds is not None]
    minutes = f", about {max(1, round(sum(estimates) / 60))} min" if len(estimates) == len(times) else ""
    return f"{text}; {len(trainings)} training{'s' if len(trainings) > 1 else ''} to run{minutes}"


def _changes(trainings: Sequence[Training], comparison: Comparison) -> dict[str, dict[str, Any]]:
    return {str(training): training.changes(comparison) for training in trainings}


def _summaries(comparison: Comparison, completed: Sequence[CompletedRun]) -> list[Summary]:
    """Return the variants in the order of the comparison, those of a grid by accuracy."""
    summaries = summarize(completed, comparison.baseline)
    return sorted(summaries, key=lambda summary: -summary.mean) if comparison.grid else summaries


def _print(comparison: Comparison, completed: Sequence[CompletedRun], *, markdown: bool) -> None:
    if completed and markdown:
        print(as_markdown(_summaries(comparison, completed), _title(comparison, completed)))
    elif completed:
        print_table(_summaries(comparison, completed), _title(comparison, completed))


def _write(comparison: Comparison, completed: Sequence[CompletedRun]) -> None:
    """Write the table, the runs and the figure."""
    import pandas as pd  # late, both: listing the entries needs neither

    from gradtrail.experiments.compare.figure import draw_comparison

    summaries, title = _summaries(comparison, completed), _title(comparison, completed)
    path = _REPORTS / comparison.name
    with atomic_file(path.with_suffix(".csv")) as temporary:
        pd.DataFrame(completed).to_csv(temporary, index=False)
    with atomic_file(path.with_suffix(".md")) as temporary:
        temporary.write_text(as_markdown(summaries, title), encoding="utf-8")
    with atomic_file(path.with_suffix(".png")) as temporary:
        draw_comparison(temporary, summaries, title)
    print(f"written to {path}.png, .csv and .md", file=sys.stderr)


def _title(comparison: Comparison, completed: Sequence[CompletedRun]) -> str:
    return f"{comparison.name} on {completed[0].dataset}: {comparison.about}".removesuffix(": ")
