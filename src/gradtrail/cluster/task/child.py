"""`python -m gradtrail.cluster.task.child`: runs an experiment with DVC, in a process that ends with its parent.

The parent holds the other end of standard input. When it ends, however it ends, this process kills its own group, and
with it DVC and the stage: no worker that was killed leaves a training behind that another worker makes anew.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gradtrail.support.errors import one_line


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What to run, in the checkout that is the working folder.

    Attributes:
        name: of the experiment.
        ref: that DVC writes it to.
        options: its changes to the params, as options of `dvc exp run`.
        stage: the last one that it runs.
        pull: whether files of states that the run-cache knows come from the DVC remote.
        push: whether files and run-cache go to the DVC remote.
    """

    name: str
    ref: str
    options: Sequence[str]
    stage: str
    pull: bool
    push: bool

    @property
    def command(self) -> list[str]:
        """The command that runs it."""
        return [sys.executable, "-m", __name__, json.dumps(asdict(self))]


def main(orders: Orders) -> int:
    """Run the experiment and push its files; return the exit status."""
    from dvc.cli import main as dvc

    pull = ["--pull"] if orders.pull else []
    command = ["exp", "run", "--temp", *pull, "--name", orders.name, *orders.options, orders.stage]
    if status := dvc(command):
        return int(status)
    return _push(orders.ref) if orders.push else 0


def _push(ref: str) -> int:
    """Push the files of an experiment and the run-cache; return the exit status, after a line that says why."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    from gradtrail.support.git import git

    commit = git("rev-parse", "--verify", "--quiet", ref)
    if not commit:  # DVC found nothing to do
        return 0
    told = _Told()
    for library in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(library).addHandler(told)
    try:
        with Repo() as repo:
            repo.push(revs=[commit], workspace=False, run_cache=True)
    except (DvcException, OSError) as error:
        why = "; ".join(dict.fromkeys([one_line(error), *told.faults[:1]]))
        print(f"ERROR: the files were not pushed: {why}", file=sys.stderr)
        return 1
    return 0


class _Told(logging.Handler):
    """Keeps what libraries say of the files that they could not transfer: their exception only counts them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        fault = record.exc_info[1] if record.exc_info else None
        self.faults.append(one_line(f"{record.getMessage()} {fault or ''}"))


def _end_with_parent() -> None:
    while os.read(0, 1):  # not through `sys.stdin`, whose lock the interpreter wants as it ends
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(Orders(**json.loads(sys.argv[1]))))
