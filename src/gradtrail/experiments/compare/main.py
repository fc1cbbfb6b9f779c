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
from gradtrail.experiments.compare.report import CAPTION, as_markdown, table_rows
from gradtrail.experiments.compare.spec import SEARCH, STAGE, Comparison, Training, read_entries, with_seeds
from gradtrail.experiments.compare.statistics import Summary, summarize
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import PARAMS, changed, read_yaml, validate
from gradtrail.support.errors import UserError
from gradtrail.support.git import head_commit
from gradtrail.support.paths import private_folder
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import table
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
    sync()
    planner = read_store()
    for name, entry in read_entries().items():
        if isinstance(entry, Comparison):
            print(f"{name}: {entry.about}\n    {_describe(entry, planner)}")
        else:
            print(f"{name}: {entry.get('about', '')}\n    {SEARCH}: {entry[SEARCH]}")


def print_results(seeds: Sequence[int] | None, *, markdown: bool) -> None:
    """Print the results that are there: a table for each comparison, and one for all entries of one variant."""
    sync()
    planner = read_store()
    singles: list[CompletedRun] = []
    for entry in read_entries().values():
        if not isinstance(entry, Comparison):
            continue
        completed = planner.completed(with_seeds(entry, seeds))
        if entry.baseline is None:
            title = f"`{entry.name}`: {entry.about}"
            singles += [dataclasses.replace(run, variant=title) for run in completed]
        elif completed:
            _print(_summaries(entry, completed), _title(entry, completed), markdown)
    if singles:
        _print(summarize(singles, None), f"entries of one variant, on {singles[0].dataset}", markdown)


def compare(comparison: Comparison, engine: Engine, seeds: Sequence[int] | None = None, *, markdown: bool) -> int:
    """Run the missing trainings of a comparison, print its table, and write it to `results/comparisons/`.

    Args:
        comparison: Comparison to complete.
        engine: Engine that runs the missing trainings.
        seeds: Seeds in place of those of the comparison.
        markdown: True to print Markdown.

    Returns:
        The exit status: 0, 1 if a run failed, or that of `dvc repro` if it failed.

    Raises:
        UserError: A param is invalid, there is no commit, or the engine fails.
    """
    comparison = with_seeds(comparison, seeds)
    planner, completed = _read(comparison)
    failed: dict[str, str] = {}
    if missing := planner.trainings(comparison, completed):
        _require_valid(missing, comparison)
        with comparison_lock():
            if status := engine.prepare(comparison.name):
                return status
            planner, completed = _read(comparison)  # earlier experiments and `dvc repro` may have made some
            if missing := planner.trainings(comparison, completed):
                planned = _changes(planner.trainings(comparison), comparison)
                failed = engine.run(comparison.name, planned, _changes(missing, comparison), STAGE)
                planner, completed = _read(comparison)
                missing = planner.trainings(comparison, completed)
    for label in map(str, missing):
        print(f"{label}: {f'failed; {failed[label]}' if label in failed else 'has no run in MLflow'}", file=sys.stderr)
    if completed:
        _report(comparison, completed, markdown=markdown)
    return 1 if missing else 0


def _read(comparison: Comparison) -> tuple[Planner, list[CompletedRun]]:
    """Return the planner and the completed runs, after a sync: DVC may have restored outputs that have no run."""
    sync()
    planner = read_store()
    return planner, planner.completed(comparison)


def _require_valid(trainings: Sequence[Training], comparison: Comparison) -> None:
    """Refuse params that a stage would refuse, before any experiment starts."""
    from gradtrail.experiments.sections import section_configs  # late: the configs import JAX

    params, configs = read_yaml(PARAMS), section_configs()
    for training in trainings:
        changed_params = changed(params, training.changes(comparison))
        for section, config in configs.items():
            validate(changed_params.get(section), config, f"{comparison.name}: {training.variant}: {section}")


def _describe(comparison: Comparison, planner: Planner) -> str:
    """Return how many runs are complete, and what the others would take."""
    completed = planner.completed(comparison)
    variants = ", ".join(comparison.variants)
    if len(comparison.variants) > _MOST_LABELS:
        variants = f"{len(comparison.variants)} variants"
    text = f"{variants}: {len(completed)} of {len(comparison.runs)} runs done"
    trainings = planner.trainings(comparison, completed)
    if not trainings:
        return text
    times = [planner.seconds(training, comparison) for training in trainings]
    known = [seconds for seconds in times if seconds is not None]
    minutes = f", about {max(1, round(sum(known) / 60))} min" if len(known) == len(times) else ""
    return f"{text}; {len(trainings)} training{'s' if len(trainings) > 1 else ''} to run{minutes}"


def _changes(trainings: Sequence[Training], comparison: Comparison) -> dict[str, dict[str, Any]]:
    return {str(training): training.changes(comparison) for training in trainings}


def _summaries(comparison: Comparison, completed: Sequence[CompletedRun]) -> list[Summary]:
    """Return the variants in the order of the comparison, those of a grid by accuracy."""
    summaries = summarize(completed, comparison.baseline)
    return sorted(summaries, key=lambda summary: -summary.mean) if comparison.grid else summaries


def _title(comparison: Comparison, completed: Sequence[CompletedRun]) -> str:
    return f"{comparison.name} on {completed[0].dataset}: {comparison.about}".removesuffix(": ")


def _report(comparison: Comparison, completed: Sequence[CompletedRun], *, markdown: bool) -> None:
    """Print the table; write the table, the runs and the figure."""
    import pandas as pd  # late, both: listing the entries needs neither

    from gradtrail.experiments.compare.figure import draw_comparison

    summaries = _summaries(comparison, completed)
    title = _title(comparison, completed)
    _print(summaries, title, markdown)
    path = _REPORTS / comparison.name
    with atomic_file(path.with_suffix(".csv")) as temporary:
        pd.DataFrame(completed).to_csv(temporary, index=False)
    with atomic_file(path.with_suffix(".md")) as temporary:
        temporary.write_text(as_markdown(summaries, title), encoding="utf-8")
    with atomic_file(path.with_suffix(".png")) as temporary:
        draw_comparison(temporary, summaries, title)
    print(f"also written to {path}.png, .csv and .md", file=sys.stderr)


def _print(summaries: Sequence[Summary], title: str, markdown: bool) -> None:
    if markdown:
        print(as_markdown(summaries, title))
        return
    rows = table_rows(summaries)
    stdout_console().print(table(title, rows, right=[*rows[0]][1:]))
    if summaries[0].is_compared:
        stdout_console().print(CAPTION, style="dim")


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
