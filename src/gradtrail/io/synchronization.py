"""Bring MLflow's store up to date: every state that was made has its row, and each training's row its headlines.

Where DVC skips or restores a stage, none of our code runs; this closes that gap. States are looked for in the working
folder's `dvc.lock`, in every commit's, in DVC's experiments and in its run-cache. A row that was lost, or never written
because the store was out of reach, is made again from the outs, which DVC's cache has; a commit's only where no row
differs from it in code alone, with the same params and the same bytes. What cannot be had from the outs is absent, and
the row carries the tag `rebuilt`: times, system metrics, figures of compiling that differ from run to run, Orbax
checkpoints, `git.diff`, and of a state that only the run-cache has, commit and experiment.
"""

import dataclasses

from filelock import FileLock

from gradtrail.io.sync_report import SyncReport
from gradtrail.io.sync_stamp import Stamp
from gradtrail.io.workspace import private_folder


def sync() -> SyncReport:
    """Give every state its row. Where nothing has changed since the last time, that is found out without MLflow."""
    stamp = Stamp()
    if last := stamp.read():
        return SyncReport(**last)
    from gradtrail.io.catching_up import catch_up  # late: it imports MLflow

    with FileLock(private_folder() / "sync.lock"):
        report, open_rows = catch_up()
        if open_rows is None:
            stamp.forget()
        else:
            stamp.write(dataclasses.asdict(report.afterwards), open_rows)
    return report
