"""`gradtrail compare`: run what is missing of a comparison, and report the result.

The runs are experiments in DVC's queue: they use the code and params of the working folder at the time of the call,
continue when this process ends, and are kept under their names like any other. Experiments that are in the queue
already are waited for first, so that nothing is run twice.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from gradtrail.experiments.sweep.members import read_table, varies_all
from gradtrail.experiments.sweep.queue import ExperimentQueue, bring_up_to_date, queue_experiments, wait_for
from gradtrail.experiments.sweep.render import answer, as_frame, as_markdown, as_table, draw_comparison, times_note
from gradtrail.experiments.sweep.runs import CompletedRun, RunFinder
from gradtrail.experiments.sweep.spec import (
    PATH,
    Comparison,
    PlannedRun,
    Training,
    choose,
    params_of,
    planned_runs,
    queue_command,
    read_comparisons,
    require_seeds,
    trainings_of,
)
from gradtrail.experiments.sweep.stats import summarize
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.overrides import PARAMS
from gradtrail.stages.common.params import read_yaml, validate
from gradtrail.support.errors import UserError, with_store
from gradtrail.support.git import git
from gradtrail.support.paths import private_folder
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import RunIndex
from gradtrail.tracking.sync.sync import sync

_REPORTS = Path("reports/comparisons")
_STILL_RUNNING = (
    "DVC's queue keeps running: `dvc queue status` shows it, `dvc queue stop --kill` stops it, "
    "and the same command waits for the rest"
)
_CAPTION = (
    "Test accuracy: mean ± standard deviation over the seeds. Difference to the first row over the seeds that both "
    "have, with its simultaneous 95 % confidence interval; significant: the interval excludes 0. p: two-sided paired "
    "t-test, adjusted by Bonferroni for the number of variants. Training times are medians; × baseline: geometric mean "
    "of the ratios of comparable seeds, with its simultaneous 95 % confidence interval. Corrected labels: accuracy "
    "with corrected test labels, of runs that read them (`preprocess.corrections`)."
)


def list_comparisons() -> int:
    """Print all comparisons: their questions, and how many of their runs are complete; return exit status 0."""
    finder = _run_finder()
    for name, comparison in read_comparisons().items():
        planned = planned_runs(comparison, comparison.seeds)
        num_done = len(finder.find(planned, comparison))
        missing = f"{len(planned) - num_done} missing" if num_done < len(planned) else "none missing"
        print(f"{name}: {comparison.about}\n    {', '.join(comparison.variants)}: {num_done} runs done, {missing}")
    return 0


def compare(name: str, seeds: Sequence[int] | None, jobs: int) -> int:
    """Run what is missing of a comparison, print its table, and write it to `reports/comparisons/`.

    `dvc repro` runs first: an experiment fails where DVC's cache lacks an out of the working folder.

    Args:
        name: name of the comparison.
        seeds: seeds of the training; None for those of `comparisons.yaml`.
        jobs: number of experiments that run at a time.

    Returns:
        The exit status: 0, 1 if a run failed, or that of `dvc repro` if it failed.

    Raises:
        UserError: a name, a seed or a param is invalid, or there is no commit; one line.
    """
    comparison = choose(name)
    planned = planned_runs(comparison, comparison.seeds if seeds is None else require_seeds(seeds, "--seeds"))
    if not git("rev-parse", "--verify", "HEAD"):
        raise UserError("a comparison runs DVC experiments, which need a git repository with a commit")
    with _compare_lock():
        queue = ExperimentQueue()
        try:
            return _run_comparison(name, comparison, planned, queue, jobs)
        except KeyboardInterrupt:
            if queue.read().is_open:
                print(f"{name}: {_STILL_RUNNING}", file=sys.stderr)
            raise


def _run_comparison(
    name: str, comparison: Comparison, planned: Sequence[PlannedRun], queue: ExperimentQueue, jobs: int
) -> int:
    tasks = queue.read()
    earlier = {task: task for task in (*tasks.running, *tasks.waiting)}
    wait_for(queue, earlier, jobs=jobs, title="experiments queued before")
    if status := bring_up_to_date():
        return status
    completed = with_store(lambda: _find_completed(planned, comparison))
    if missing := _without(planned, completed):
        failed = _run_missing(queue, missing, comparison, name, jobs)
        completed = with_store(lambda: _find_completed(planned, comparison))
        missing = _without(planned, completed)
        _print_missing(missing, failed)
    if completed:
        _report(name, comparison, completed)
    return 1 if missing else 0


def _without(planned: Sequence[PlannedRun], completed: Sequence[CompletedRun]) -> list[PlannedRun]:
    found = {each.planned for each in completed}
    return [run for run in planned if run not in found]


def _find_completed(planned: Sequence[PlannedRun], comparison: Comparison) -> list[CompletedRun]:
    """Return the completed runs, after a sync: DVC may have restored some without a run in MLflow."""
    sync()
    return _run_finder().find(planned, comparison)


def _run_finder() -> RunFinder:
    client = open_store()
    return RunFinder(RunIndex(client), functools.partial(read_table, client))


def _run_missing(
    queue: ExperimentQueue, missing: Sequence[PlannedRun], comparison: Comparison, name: str, jobs: int
) -> dict[PlannedRun, str]:
    """Queue runs and wait for them; return those that failed, each with the name of its experiment."""
    trainings = trainings_of(missing, together=not comparison.timed and varies_all(read_yaml(PARAMS)))
    _require_valid(trainings, comparison, name)
    commands = [queue_command(training, comparison) for training in trainings]
    experiments = dict(zip(queue_experiments(commands), trainings, strict=True))
    labels = {experiment: str(training) for experiment, training in experiments.items()}
    failed = wait_for(queue, labels, jobs=jobs, title=name)
    return {run: experiment for experiment in failed for run in experiments[experiment].runs}


def _require_valid(trainings: Sequence[Training], comparison: Comparison, name: str) -> None:
    """Refuse params that a stage would refuse, before any experiment is queued."""
    from gradtrail.experiments.repro import section_configs  # late: it imports JAX

    params, configs = read_yaml(PARAMS), section_configs()
    for training in trainings:
        changed_params = params_of(training, comparison, params)
        for section, into in configs.items():
            validate(changed_params.get(section), into, f"{PATH}: {name}.variants.{training.label}: {section}")


def _print_missing(missing: Sequence[PlannedRun], failed: dict[PlannedRun, str]) -> None:
    for run in missing:
        why = f"failed; `dvc queue logs {failed[run]}` shows why" if run in failed else "has no run in MLflow"
        print(f"{run}: {why}", file=sys.stderr)


def _report(name: str, comparison: Comparison, completed: Sequence[CompletedRun]) -> None:
    """Print the table and the answer; write the table, the runs and the figure."""
    summaries = summarize(completed, comparison)
    title = f"{name} on {completed[0].dataset}"
    console = stdout_console()
    console.print(as_table(summaries, f"{title}: {comparison.about}"))
    console.print(answer(summaries))
    caption = f"{_CAPTION} {times_note(summaries)}".strip()
    path = _REPORTS / name
    with atomic_file(path.with_suffix(".csv")) as temporary:
        as_frame(completed).to_csv(temporary, index=False)
    with atomic_file(path.with_suffix(".md")) as temporary:
        temporary.write_text(as_markdown(summaries, f"**{title}**: {comparison.about}", caption), encoding="utf-8")
    with atomic_file(path.with_suffix(".png")) as temporary:
        draw_comparison(temporary, summaries, title)
    console.print(f"Also written to {path}.png, .csv and .md. {caption}", style="dim")


@contextlib.contextmanager
def _compare_lock() -> Iterator[None]:
    """Hold the lock of `gradtrail compare`; where another process has it, say so and wait."""
    lock = FileLock(private_folder() / "compare.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("compare: another comparison is running; waiting for it to end", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
