"""`gradtrail diff A B`: two runs of one stage side by side, and why one was slower."""

import json
from dataclasses import asdict
from pathlib import Path

from gradtrail.experiments.diff import page, tables
from gradtrail.experiments.diff.cause import most_likely_cause
from gradtrail.experiments.diff.compare import compare
from gradtrail.experiments.diff.sides import find_side
from gradtrail.experiments.diff.timed import Timing, time_runs
from gradtrail.stages.common.files import atomic_file
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import RunIndex

_REPORTS = Path("results/diff")


def diff(before: str, after: str, stage: str | None, *, as_json: bool, timing: Timing | None = None) -> None:
    """Compare two runs; print what differs, and write it as a page. Changes nothing in the store.

    Args:
        before: the first run, see `find_side`.
        after: the second one.
        stage: of the runs, where a name stands for a training; None for the training itself.
        as_json: print everything as JSON, and write no page.
        timing: how to time both trainings against each other; None to run nothing.

    Raises:
        UserError: there is no such run, the runs are of different stages, or one cannot be timed; one line.
    """
    client = open_store()
    runs = RunIndex(client).runs()
    found = compare(*(find_side(what, runs, client, stage) for what in (before, after)))
    cause = most_likely_cause(found)
    ratio = time_runs((found.before, found.after), timing) if timing else None
    console = stdout_console()
    if as_json:
        timed = {"timed": asdict(ratio)} if ratio else {}
        console.print(json.dumps(tables.as_json(found, cause) | timed, indent=2), soft_wrap=True)
        return
    console.print(cause, style="bold", soft_wrap=True)
    if ratio:
        console.print(f"Timed: {ratio.describe()}", soft_wrap=True)
    for letter, side in zip("AB", (found.before, found.after), strict=True):
        console.print(f"{letter}  {side.name}", soft_wrap=True)
    for note in tables.notes(found):
        console.print(f"note: {note}", soft_wrap=True)
    for table in tables.all_tables(found):
        console.print()
        console.print(table.for_terminal())
    names = (f"{side.run.info.run_id[:8]}@{side.attempt}" for side in (found.before, found.after))
    path = _REPORTS / f"{'..'.join(names)}.html"
    with atomic_file(path) as temporary:
        temporary.write_text(page.render(found, cause, ratio), encoding="utf-8")
    console.print(f"\nAlso written to {path}", soft_wrap=True)
