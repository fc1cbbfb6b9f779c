"""`gradtrail compare`: make the runs of a comparison that are missing, and say what came out.

The runs are experiments in DVC's queue, so they use the working folder's code and params as they are at the call, go on
when this process ends, and are kept under their names like any other. What the queue holds of an earlier call, or of
its owner, is waited for first: no run is made twice.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from gradtrail.experiments.sweep.queue import ExperimentQueue, bring_up_to_date, queue_experiments, wait_for
from gradtrail.experiments.sweep.render import answer, as_frame, as_markdown, as_table, draw_comparison
from gradtrail.experiments.sweep.runs import CompletedRun, MadeRuns
from gradtrail.experiments.sweep.spec import (
    PATH,
    STAGE,
    Comparison,
    PlannedRun,
    choose,
    params_of,
    queue_commands,
    read_comparisons,
    require_seeds,
    wanted_runs,
)
from gradtrail.experiments.sweep.stats import Summary, summarize
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
_LEFT_ALONE = (
    "DVC's queue goes on by itself: `dvc queue status` shows it, `dvc queue stop --kill` stops it, "
    "and the same command waits for the rest"
)
_CAPTION = (
    "Test accuracy: mean ± standard deviation over the seeds. Difference to the first line over the seeds that both "
    "have, with its 95 % confidence interval. p: two-sided paired t-test, adjusted by Holm for the number of variants; "
    "more than chance: p of at most 0.05. Times are medians; they depend on the machine and on what else it does."
)


def list_comparisons() -> None:
    """Print all comparisons: their questions, and how many of their runs were made."""
    made_runs = MadeRuns(RunIndex(open_store()))
    for name, comparison in read_comparisons().items():
        wanted = wanted_runs(comparison, comparison.seeds)
        num_made = len(made_runs.among(wanted, comparison))
        missing = f"{len(wanted) - num_made} missing" if num_made < len(wanted) else "none missing"
        print(f"{name}: {comparison.about}\n    {', '.join(comparison.variants)}: {num_made} runs done, {missing}")


def compare(name: str, seeds: Sequence[int] | None, jobs: int) -> int:
    """Make what is missing of a comparison, print its table, and write it down in `reports/comparisons/`.

    The working folder is brought up to date first: DVC ends an experiment in a fault where the cache lacks an out.

    Args:
        name: of the comparison.
        seeds: of the training; None for those of `comparisons.yaml`.
        jobs: experiments at a time.

    Returns:
        0, or 1 where a run failed, or what `dvc repro` returned where it failed.

    Raises:
        UserError: something is wrong with what was asked; one line.
    """
    comparison = choose(name)
    wanted = wanted_runs(comparison, comparison.seeds if seeds is None else require_seeds(seeds, "--seeds"))
    if not git("rev-parse", "--verify", "HEAD"):
        raise UserError("a comparison is made of DVC's experiments, which need git and a first commit")
    with _one_at_a_time():
        queue = ExperimentQueue()
        try:
            return _bring_about(name, comparison, wanted, queue, jobs)
        except KeyboardInterrupt:
            if queue.read().is_open:
                print(f"{name}: {_LEFT_ALONE}", file=sys.stderr)
            raise


def _bring_about(
    name: str, comparison: Comparison, wanted: Sequence[PlannedRun], queue: ExperimentQueue, jobs: int
) -> int:
    tasks = queue.read()
    earlier = {task: task for task in (*tasks.running, *tasks.waiting)}
    wait_for(queue, earlier, jobs=jobs, title="experiments queued before")
    if status := bring_up_to_date(STAGE):
        return status
    made = _look_up(wanted, comparison)
    missing = _lacking(wanted, made)
    if missing:
        failed = _make(queue, missing, comparison, name, jobs)
        made = _look_up(wanted, comparison)
        missing = _lacking(wanted, made)
        _tell_missing(missing, failed)
    if made:
        _report(name, comparison, made)
    return 1 if missing else 0


def _lacking(wanted: Sequence[PlannedRun], made: Sequence[CompletedRun]) -> list[PlannedRun]:
    found = {each.run for each in made}
    return [run for run in wanted if run not in found]


def _look_up(wanted: Sequence[PlannedRun], comparison: Comparison) -> list[CompletedRun]:
    """Return the runs that were made; those that DVC restored, or whose rows were lost, get their rows first."""

    def look_up() -> list[CompletedRun]:
        sync()
        return MadeRuns(RunIndex(open_store())).among(wanted, comparison)

    return with_store(look_up)


def _make(
    queue: ExperimentQueue, missing: Sequence[PlannedRun], comparison: Comparison, name: str, jobs: int
) -> dict[PlannedRun, str]:
    """Queue runs and wait for them.

    Returns:
        Those that failed, each with the name of its experiment.
    """
    _require_valid(missing, comparison, name)
    experiments: dict[str, PlannedRun] = {}
    for command, runs in queue_commands(missing, comparison):
        experiments |= dict(zip(queue_experiments(command), runs, strict=True))
    labels = {experiment: str(run) for experiment, run in experiments.items()}
    failed = wait_for(queue, labels, jobs=jobs, title=name)
    return {experiments[experiment]: experiment for experiment in failed}


def _require_valid(runs: Sequence[PlannedRun], comparison: Comparison, name: str) -> None:
    """Refuse params that a stage would refuse, before any experiment is queued."""
    from gradtrail.experiments.repro import SECTIONS  # late: it knows every stage's config

    params = read_yaml(PARAMS)
    for run in runs:
        made_with = params_of(run, comparison, params)
        for section, into in SECTIONS.items():
            validate(made_with.get(section), into, f"{PATH}: {name}.variants.{run.label}: {section}")


def _tell_missing(missing: Sequence[PlannedRun], failed: dict[PlannedRun, str]) -> None:
    for run in missing:
        why = f"failed; `dvc queue logs {failed[run]}` shows why" if run in failed else "left no row in MLflow"
        print(f"{run}: {why}", file=sys.stderr)


def _report(name: str, comparison: Comparison, made: Sequence[CompletedRun]) -> None:
    """Print the table and the answer; write table, runs and picture."""
    summaries = summarize(made, comparison)
    dataset = made[0].dataset
    console = stdout_console()
    console.print(as_table(summaries, f"{name} on {dataset}: {comparison.about}"))
    console.print(answer(summaries))
    place = _write(name, comparison, made, summaries)
    console.print(f"{place}.png, .csv and .md have it too. {_CAPTION}", style="dim")


def _write(name: str, comparison: Comparison, made: Sequence[CompletedRun], summaries: Sequence[Summary]) -> Path:
    place = _REPORTS / name
    title = f"{name} on {made[0].dataset}"
    with atomic_file(place.with_suffix(".csv")) as beside:
        as_frame(made).to_csv(beside, index=False)
    with atomic_file(place.with_suffix(".md")) as beside:
        beside.write_text(as_markdown(summaries, f"**{title}**: {comparison.about}", _CAPTION), encoding="utf-8")
    with atomic_file(place.with_suffix(".png")) as beside:
        draw_comparison(beside, summaries, title)
    return place


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold the lock of comparing; where another process has it, say so and wait."""
    lock = FileLock(private_folder() / "compare.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("compare: another comparison is being made; waiting for it to end", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
