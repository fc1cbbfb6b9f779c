"""`python -m gradtrail.cluster.child`: runs an experiment with DVC, in a process that ends with its parent.

The parent holds the other end of standard input. If it ends for any reason, this process kills its own process group,
and with it DVC and the stage, so that a killed worker leaves no training running that another worker starts again.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradtrail.cluster.refs import committed_lock
from gradtrail.stages.common.pipeline_file import output_digests
from gradtrail.support.errors import one_line


@dataclass(frozen=True, kw_only=True)
class DvcRun:
    """One `dvc exp run` in the checkout that is the working folder."""

    name: str  # name of the experiment
    ref: str  # ref that DVC creates
    options: Sequence[str]  # changes to the params, as options of `dvc exp run`
    stage: str  # last stage to run
    pull: bool  # True if DVC looks up states in the DVC remote's run-cache
    push: bool  # True if files and run-cache go to the DVC remote

    @property
    def command(self) -> list[str]:
        """The command that starts it."""
        return [sys.executable, "-m", __name__, json.dumps(asdict(self))]


def main(dvc_run: DvcRun) -> int:
    """Run the experiment and push its files; return the exit status."""
    from dvc.cli import main as dvc

    pull = ["--pull"] if dvc_run.pull else []
    command = ["exp", "run", "--temp", *pull, "--name", dvc_run.name, *dvc_run.options, dvc_run.stage]
    if status := dvc(command):
        return int(status)
    return _push(dvc_run.ref) if dvc_run.push else 0


def _push(ref: str) -> int:
    """Push the files of an experiment and the run-cache; if that fails, print why and return 1."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    from gradtrail.support.git import git

    commit = git("rev-parse", "--verify", "--quiet", ref)
    if not commit:  # DVC had nothing to do
        return 0
    errors = _ErrorCollector()
    for library in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(library).addHandler(errors)
    try:
        with Repo() as repo:
            repo.push(revs=[commit], workspace=False, run_cache=True)
            _push_uncached(repo, commit)
    except (DvcException, OSError) as error:
        why = "; ".join(dict.fromkeys([one_line(error), *errors.messages[:1]]))
        print(f"ERROR: the files were not pushed: {why}", file=sys.stderr)
        return 1
    return 0


def _push_uncached(repo: Any, commit: str) -> None:
    """Push the outputs that git tracks, such as metrics.

    `dvc push` does not, but DVC restores a stage from the run-cache only if it gets all of its outputs.
    """
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.transfer import transfer

    digests = {md5 for section in committed_lock(commit).values() for md5 in output_digests(section).values()}
    objects = {HashInfo("md5", md5) for md5 in digests if not md5.endswith(".dir") and repo.cache.local.exists(md5)}
    transfer(repo.cache.local, repo.cloud.get_remote_odb(), objects, shallow=True)


class _ErrorCollector(logging.Handler):
    """Collects the errors that libraries log for single files: their exception only counts the files."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.messages.append(one_line(f"{record.getMessage()} {error or ''}"))


def _end_with_parent() -> None:
    while os.read(0, 1):  # not through `sys.stdin`, whose lock the interpreter needs on exit
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(DvcRun(**json.loads(sys.argv[1]))))
