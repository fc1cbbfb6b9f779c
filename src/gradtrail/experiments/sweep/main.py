"""`gradtrail compare`: run the missing experiments of a comparison, and report the result.

The runs are DVC experiments. In DVC's queue they use the code and params of the working folder at the time of the call,
on a cluster those of the commit. Both continue when this process ends, and DVC lists the experiments by name like any
other. Experiments that are already running are waited for, so that nothing runs twice.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from gradtrail.experiments.sweep.engine import Engine, QueueEngine
from gradtrail.experiments.sweep.missing import complete, run_finder
from gradtrail.experiments.sweep.render import answer, as_frame, as_markdown, as_table, draw_comparison, times_note
from gradtrail.experiments.sweep.runs import CompletedRun
from gradtrail.experiments.sweep.spec import (
    PATH,
    Comparison,
    choose,
    planned_runs,
    read_comparisons,
    require_seeds,
)
from gradtrail.experiments.sweep.stats import summarize
from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import UserError
from gradtrail.support.git import head_commit
from gradtrail.support.paths import private_folder
from gradtrail.support.progress import stdout_console

_REPORTS = Path("results/comparisons")
_CAPTION = (
    "Test accuracy: mean ± standard deviation over the seeds. Difference to the first row over the seeds that both "
    "have, with its simultaneous 95 % confidence interval; significant: the interval excludes 0. p: two-sided paired "
    "t-test, adjusted by Bonferroni for the number of variants. Training times are medians; × baseline: geometric mean "
    "of the ratios of comparable seeds, with its simultaneous 95 % confidence interval. Corrected labels: accuracy "
    "with corrected test labels, of runs that read them (`preprocess.corrections`)."
)


def list_comparisons() -> int:
    """Print the question and the number of complete runs of each comparison; return exit status 0."""
    finder = run_finder()
    for name, comparison in read_comparisons().items():
        planned = planned_runs(comparison, comparison.seeds)
        num_done = len(finder.find(planned, comparison))
        print(
            f"{name}: {comparison.about}\n    {', '.join(comparison.variants)}: {num_done} of {len(planned)} runs done"
        )
    return 0


def compare(name: str, seeds: Sequence[int] | None, engine: Engine | None = None, *, jobs: int = 1) -> int:
    """Run the missing experiments of a comparison, print its table, and write it to `results/comparisons/`.

    Args:
        name: Name of the comparison.
        seeds: Seeds of the training; None for those of `experiments.yaml`.
        engine: Engine that runs the experiments; None for DVC's queue.
        jobs: Number of experiments that DVC's queue runs in parallel.

    Returns:
        The exit status: 0, 1 if a run failed, or that of `dvc repro` if it failed.

    Raises:
        UserError: A name, a seed or a param is invalid, or there is no commit.
    """
    comparison = choose(name)
    planned = planned_runs(comparison, comparison.seeds if seeds is None else require_seeds(seeds, "--seeds"))
    require_commit()
    with sweep_lock():
        engine = engine or QueueEngine(jobs)
        if status := engine.prepare(name):
            return status
        completed = complete(name, comparison, planned, engine, f"{PATH}: {name}.variants")
    if completed:
        _report(name, comparison, completed)
    return 1 if len(completed) < len(planned) else 0


def require_commit() -> None:
    """Raise UserError if there is no commit for DVC experiments to start from."""
    if not head_commit():
        raise UserError("a comparison runs DVC experiments, which need a git repository with a commit")


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
def sweep_lock() -> Iterator[None]:
    """Hold the lock of comparisons and sweeps; if another process holds it, print that and wait."""
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
