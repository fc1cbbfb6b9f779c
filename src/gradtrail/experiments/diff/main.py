"""`gradtrail diff A B`: the differences of two runs of one stage, and why one was slower."""

import json
from dataclasses import asdict
from pathlib import Path

from gradtrail.experiments.diff import page, tables
from gradtrail.experiments.diff.cause import most_likely_cause
from gradtrail.experiments.diff.compare import compare
from gradtrail.experiments.diff.sides import find_details
from gradtrail.experiments.diff.timed import Timing, time_runs
from gradtrail.stages.common.files import atomic_file
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import RunIndex

_REPORTS = Path("results/diff")


def diff(before: str, after: str, stage: str | None, *, as_json: bool, timing: Timing | None = None) -> None:
    """Compare two runs, print the differences, and write them as a page. Changes nothing in the store.

    Args:
        before: Word for the first run; see `find_details`.
        after: Word for the second run.
        stage: Stage of the runs if a word stands for a training; None for the training itself.
        as_json: True to print everything as JSON, and write no page.
        timing: Options for timing both trainings; None to run nothing.

    Raises:
        UserError: A run does not exist, the runs are of different stages, or one cannot be timed.
    """
    client = open_store()
    runs = RunIndex(client).runs()
    comparison = compare(*(find_details(word, runs, client, stage) for word in (before, after)))
    cause = most_likely_cause(comparison)
    ratio = time_runs((comparison.before, comparison.after), timing) if timing else None
    console = stdout_console()
    if as_json:
        timed = {"timed": asdict(ratio)} if ratio else {}
        console.print(json.dumps(tables.as_json(comparison, cause) | timed, indent=2), soft_wrap=True)
        return
    console.print(cause, style="bold", soft_wrap=True)
    if ratio:
        console.print(f"Timed: {ratio.describe()}", soft_wrap=True)
    for letter, side in zip("AB", (comparison.before, comparison.after), strict=True):
        console.print(f"{letter}  {side.name}", soft_wrap=True)
    for note in tables.notes(comparison):
        console.print(f"note: {note}", soft_wrap=True)
    for table in tables.all_tables(comparison):
        console.print()
        console.print(table.for_terminal())
    names = (f"{side.run.info.run_id[:8]}@{side.attempt}" for side in (comparison.before, comparison.after))
    path = _REPORTS / f"{'..'.join(names)}.html"
    with atomic_file(path) as temporary:
        temporary.write_text(page.render(comparison, cause, ratio), encoding="utf-8")
    console.print(f"\nAlso written to {path}", soft_wrap=True)
