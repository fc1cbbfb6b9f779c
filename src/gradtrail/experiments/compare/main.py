"""`gradtrail compare`: list the entries of `experiments.yaml`, run what one of them lacks, and report the results.

The runs are DVC experiments, made by an engine: DVC's queue (`queue.py`), or a Ray cluster (`cluster/engine.py`).
Consecutive seeds are the members of one training, in one process.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from filelock import FileLock, Timeout

from gradtrail.experiments.compare.plan import CompletedRun, Planner, read_store, trainings_of
from gradtrail.experiments.compare.report import as_markdown, draw_comparison, print_table
from gradtrail.experiments.compare.spec import SEARCH, STAGE, Comparison, read_entries, with_seeds
from gradtrail.experiments.compare.statistics import summarize
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import PARAMS, changed, params_file, validate
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError
from gradtrail.support.git import head_commit
from gradtrail.support.paths import private_folder

NO_RUN = "has no run in MLflow; `gradtrail sync --restore RUN` brings back one that was deleted"
_REPORTS = Path("results/comparisons")
_READING = "compare: reading the runs in MLflow"  # which takes a while after many commits
_MOST_LABELS = 8  # more variants are listed by their number
Result = TypeVar("Result")
Changes = Mapping[str, Mapping[str, Any]]  # label of an experiment → dotted key → value


class Engine(Protocol):
    """Runs experiments."""

    def prepare(self) -> None:
        """Prepare to run experiments, or raise UserError or SystemExit."""
        ...

    def run(self, title: str, planned: Changes, missing: Changes, stage: str) -> dict[str, str]:
        """Run the missing ones of the planned experiments up to a stage; return the reason of each failure."""
        ...


def list_entries() -> None:
    """Print each entry, what is there of it, and what the rest would take."""
    print(_READING, file=sys.stderr)
    planner = read_store()
    for name, entry in read_entries().items():
        if isinstance(entry, Comparison):
            print(f"{name}: {entry.about}\n    {_describe(entry, planner)}")
        else:
            print(f"{name}: {entry.get('about', '')}\n    {SEARCH}: {entry[SEARCH]}")


def print_results(seeds: Sequence[int] | None, *, markdown: bool) -> None:
    """Print the results that are there: a table for each comparison, and one for all entries of one variant."""
    print(_READING, file=sys.stderr)
    planner = read_store()
    singles: list[CompletedRun] = []
    for entry in read_entries().values():
        if isinstance(entry, Comparison):
            completed = planner.completed(with_seeds(entry, seeds))
            if entry.baseline is not None:
                _report(entry, completed, markdown=markdown)
            else:
                title = f"`{entry.name}`: {entry.about}"
                singles += [dataclasses.replace(run, variant=title) for run in completed]
    _report(Comparison(name="entries of one variant"), singles, markdown=markdown)


def run_comparison(
    comparison: Comparison, engine: Engine, seeds: Sequence[int] | None = None, *, markdown: bool
) -> int:
    """Run the missing trainings of a comparison, print its table, and write it to `results/comparisons/`.

    Returns the exit status: 0, or 1 if a run failed.
    """
    comparison = with_seeds(comparison, seeds)
    require_valid(trainings_of(comparison, comparison.runs, together=True), comparison.name)
    print(_READING, file=sys.stderr)

    def plan() -> tuple[Changes, Changes, list[CompletedRun]]:
        planner = read_store()
        completed = planner.completed(comparison)
        return planner.trainings(comparison), planner.trainings(comparison, completed), completed

    completed, missing = run_missing(comparison.name, plan, engine, STAGE)
    _report(comparison, completed, markdown=markdown, is_saved=True)
    return 1 if missing else 0


def run_missing(
    title: str, plan: Callable[[], tuple[Changes, Changes, Result]], engine: Engine, stage: str
) -> tuple[Result, Changes]:
    """Run the missing ones of the planned experiments up to a stage, and print why any are still missing.

    `plan` returns the planned experiments, the missing ones and a result. Return the result in the end, and what is
    missing then.
    """
    planned, missing, result = plan()
    failed: dict[str, str] = {}
    if missing:
        with comparison_lock():
            engine.prepare()
            planned, missing, result = plan()  # earlier experiments and `dvc repro` may have made some
            if missing:
                failed = engine.run(title, planned, missing, stage)
                _, missing, result = plan()
    for label in missing:
        why = f"failed; {failed[label]}" if label in failed else NO_RUN
        print(f"{label}: {why}", file=sys.stderr)
    return result, missing


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
        held = lock.acquire(timeout=0)
    except Timeout:
        print("compare: waiting for another comparison to end", file=sys.stderr)
        held = lock.acquire()
    with held:
        yield


def require_valid(trainings: Changes, name: str) -> None:
    """Refuse params that a stage would refuse, before any experiment starts."""
    from gradtrail.experiments.param_classes import SECTIONS  # late: the configs import JAX

    params = read_yaml(PARAMS)
    for label, changes in trainings.items():
        changed_params = changed(params, changes)
        for section, config in SECTIONS.items():
            if params_file(section) == PARAMS:
                validate(changed_params.get(section), config, f"{name}: {label}: {section}")


def _describe(comparison: Comparison, planner: Planner) -> str:
    """Return how many runs are complete, and what the others would take."""
    completed, count = planner.completed(comparison), len(comparison.variants)
    variants = ", ".join(comparison.variants) if count <= _MOST_LABELS else f"{count} variants"
    text = f"{variants}: {len(completed)} of {len(comparison.runs)} runs done"
    trainings = planner.trainings(comparison, completed)
    if not trainings:
        return text
    text += f"; {len(trainings)} training{'s' if len(trainings) > 1 else ''} to run"
    estimates = [planner.seconds(changes) for changes in trainings.values()]
    if None in estimates:
        return text
    seconds, runs = zip(*filter(None, estimates), strict=True)
    similar = {*map(str, runs)}
    source = min(similar) if len(similar) == 1 else f"{len(similar)} similar runs"
    return f"{text}, about {max(1, round(sum(seconds) / 60))} min, as {source}"


def _report(
    comparison: Comparison, completed: Sequence[CompletedRun], *, markdown: bool, is_saved: bool = False
) -> None:
    """Print the table of the completed runs, if there are any; if `is_saved`, write it with the runs and a figure."""
    if not completed:
        return
    summaries = summarize(completed, comparison.baseline)
    if comparison.grid:
        summaries.sort(key=lambda summary: -summary.mean)
    title = f"{comparison.name} on {completed[0].dataset}: {comparison.about}".removesuffix(": ")
    if is_saved:
        import pandas as pd  # late: it takes long to import

        path = _REPORTS / comparison.name
        with atomic_file(path.with_suffix(".csv")) as temporary:
            pd.DataFrame(completed).to_csv(temporary, index=False)
        with atomic_file(path.with_suffix(".md")) as temporary:
            temporary.write_text(as_markdown(summaries, title), encoding="utf-8")
        with atomic_file(path.with_suffix(".png")) as temporary:
            draw_comparison(temporary, summaries, title)
        print(f"written to {path}.png, .csv and .md", file=sys.stderr)
    if markdown:
        print(as_markdown(summaries, title))
    else:
        print_table(summaries, title)
