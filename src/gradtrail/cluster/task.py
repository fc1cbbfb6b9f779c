"""Runs one experiment on this machine and publishes it: plain code that does not import Ray.

The order makes a kill at any moment harmless: files and run-cache go to the DVC remote, runs to MLflow, and the push of
the experiment's ref comes last. Only an experiment with a ref counts as done. If two jobs run the same experiment at
the same time, both compute the same bytes, and the first push decides whose ref is published.

The experiment runs in a checkout of its own, by a child process: `python -m gradtrail.cluster.task REQUEST`.
"""

import collections
import contextlib
import hashlib
import itertools
import logging.handlers
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gradtrail.cluster.request import Places, PlannedExperiment, Request, read_refs
from gradtrail.stages.common.params import as_options
from gradtrail.stages.common.pipeline_file import output_digests, stages_before
from gradtrail.support.errors import UserError, is_store_fault, one_line, redacted
from gradtrail.support.git import CommandError, reason, strict_git, with_interpreter
from gradtrail.tracking.dvc_history import consistent_stages, find_experiments, snapshot_of
from gradtrail.tracking.state import Experiment, Snapshot

FOLDER = "GRADTRAIL_CLUSTER_DIR"  # variable with the folder of a node
_STORE_SECONDS = 900.0  # longest wait for an MLflow server that is down
_PAUSE_SECONDS = 3.0
_LAST_LINES = 40  # lines of output that are searched for the reason of a failure
# Variables of Ray, and of a DVC that runs this process
_ENV_PREFIXES_TO_DROP = ("RAY_", "DVC_ROOT", "DVC_STAGE", "DVC_EXP_", "OMP_NUM_THREADS", "MLFLOW_RUN_ID")


def make_experiment(request: Request, experiment: PlannedExperiment) -> str:
    """Run an experiment and publish it, unless its ref exists; return the outcome in words.

    After a UserError nothing is published, and the same call can be repeated.
    """
    places = request.places
    if read_refs(places.git_url, [experiment.ref]):
        return "done before"
    with _checkout(places) as folder:
        _run_child(replace(request, experiments=(experiment,)), folder)
        commit = strict_git("for-each-ref", "--format=%(objectname)", experiment.ref, folder=folder)
        if not commit:
            return "the commit itself"
        return "done" if _publish(places.git_url, experiment.ref, commit, folder) else "done before"


def _publish(url: str, ref: str, commit: str, folder: Path) -> bool:
    """Create a ref by a push that fails if the ref exists; return whether the ref names this commit now."""
    try:
        strict_git("push", "--quiet", f"--force-with-lease={ref}:", url, f"{commit}:{ref}", folder=folder)
    except CommandError:
        current = read_refs(url, [ref])  # the push may have arrived although its answer was lost
        if ref not in current:
            raise
        return current[ref] == commit
    return True


@contextlib.contextmanager
def _checkout(places: Places) -> Iterator[Path]:
    """Yield a clean checkout of the commit that no other process uses while the block runs.

    The checkouts of a repository lie in one folder of the node, which also has the DVC cache that they share.
    """
    base = Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "gradtrail" / "cluster")
    node = base / hashlib.sha256(places.git_url.encode()).hexdigest()[:16]
    with _first_free(node / "checkouts") as folder:

        def run_git(*arguments: str) -> str:
            return strict_git(*arguments, folder=folder)

        # The process that used it before may have been killed
        for lock in (folder / ".git").rglob("*.lock"):
            lock.unlink()
        run_git("init", "--quiet")
        for ref in run_git("for-each-ref", "--format=%(refname)", "refs/exps").splitlines():
            run_git("update-ref", "-d", ref)
        shutil.rmtree(folder / ".dvc" / "tmp" / "exps", ignore_errors=True)

        refs = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
        run_git("fetch", "--quiet", places.git_url, *refs)
        run_git("checkout", "--quiet", "--force", "--detach", places.commit)
        run_git("clean", "--quiet", "--force", "-d")

        settings = {"remote.origin.url": places.git_url, "user.name": "gradtrail", "user.email": "gradtrail@localhost"}
        for key, value in settings.items():
            run_git("config", key, value)
        cache = places.cache or node / "cache"
        config = f"[core]\n    analytics = false\n    check_update = false\n[cache]\n    dir = {cache}\n"
        (folder / ".dvc" / "config.local").write_text(config, encoding="utf-8")
        yield folder


@contextlib.contextmanager
def _first_free(folder: Path) -> Iterator[Path]:
    """Yield the first of the folders `0`, `1`, … that no process uses."""
    for number in itertools.count():
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(Timeout), FileLock(folder / f"{number}.lock", timeout=0):
            yield folder / str(number)
            return


def _run_child(request: Request, folder: Path) -> None:
    """Run the experiment of a request, with the code of its checkout, in a child that ends if this process ends."""
    env = {name: value for name, value in with_interpreter().items() if not name.startswith(_ENV_PREFIXES_TO_DROP)}
    env |= {"PYTHONPATH": str(folder / "src"), "MLFLOW_TRACKING_URI": request.places.tracking_uri}
    env |= {"DVC_NO_ANALYTICS": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "gradtrail.cluster.task", request.as_json()]
    last = collections.deque[str](maxlen=_LAST_LINES)
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as child:
        for line in child.stdout or ():
            print(redacted(line), end="", flush=True)
            last.append(line)
    if child.returncode:
        raise UserError(reason("".join(last)))


def _end_with_parent() -> None:
    """End this process group, DVC and the stage too, when the parent ends for any reason: it holds stdin open.

    A killed worker thus leaves no training running that another worker starts again. Ray's subreaper cannot do this:
    with it Python no longer gets the exit status of a process that it started.
    """
    while os.read(0, 1):  # not through `sys.stdin`, whose lock the interpreter needs on exit
        pass
    os.killpg(0, signal.SIGKILL)


def main(request: Request) -> int:
    """Run the experiment of a request in the checkout that is the working folder; return the exit status."""
    from dvc.cli import main as dvc  # late: it takes half a second, which only the child needs

    (experiment,) = request.experiments
    name = experiment.ref.rpartition("/")[2]
    is_remote = request.places.cache is None
    pull = ["--pull"] if is_remote else []  # inputs, and states that other experiments have made
    options = [*pull, "--name", name, *as_options(experiment.changes)]
    if status := dvc(["exp", "run", "--temp", *options, experiment.stage]):
        return int(status)
    recorded = next((one for one in find_experiments() if one.name == name), None)
    snapshot = snapshot_of(recorded.commit) if recorded else None
    if recorded is None or snapshot is None:  # DVC had nothing to do
        return 0
    try:
        if is_remote:
            _push_files(recorded.commit, snapshot)
        _log_runs(experiment, recorded, snapshot)
    except UserError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    return 0


def _push_files(commit: str, snapshot: Snapshot) -> None:
    """Push the files of an experiment and the run-cache.

    `dvc push` leaves out the outputs that git tracks, such as metrics, but DVC restores a stage from the run-cache only
    if it gets all of its outputs.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    errors = queue.SimpleQueue[logging.LogRecord]()  # of single files, which the exception only counts
    handler = logging.handlers.QueueHandler(errors)
    handler.setLevel(logging.ERROR)
    for library in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(library).addHandler(handler)
    try:
        with Repo() as repo:
            repo.push(revs=[commit], workspace=False, run_cache=True)
            md5s = {md5 for section in snapshot.lock.values() for md5 in output_digests(section).values()}
            files = [md5 for md5 in md5s if not md5.endswith(".dir") and repo.cache.local.exists(md5)]
            copy_objects(files, repo.cache.local, repo.cloud.get_remote_odb())
    except (DvcException, OSError) as error:
        why = "" if errors.empty() else f"; {reason(errors.get().getMessage())}"
        raise UserError(f"the files were not pushed: {one_line(error)}{why}") from None


def copy_objects(md5s: Iterable[str], source: Any, target: Any) -> None:
    """Copy files from one of DVC's stores, such as its cache, to another; of folders only the listings."""
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.transfer import transfer

    transfer(source, target, {HashInfo("md5", md5) for md5 in md5s}, shallow=True)


def _log_runs(experiment: PlannedExperiment, recorded: Experiment, snapshot: Snapshot) -> None:
    """Complete the runs of an experiment in MLflow; wait for a server that is down.

    A run is shipped from its record, or rebuilt from the files if the record was lost with its node.
    """
    from gradtrail.tracking.backfill import backfill_experiment  # late: these import MLflow
    from gradtrail.tracking.runs import StoredRuns
    from gradtrail.tracking.shipper import ship_records
    from gradtrail.tracking.store import open_store

    names = [*stages_before(experiment.stage, snapshot.pipeline), experiment.stage][-1 - len(experiment.shared) :]
    stages = [stage for stage in consistent_stages(snapshot) if stage.name in names]
    deadline = time.monotonic() + _STORE_SECONDS
    while True:
        try:
            ship_records()
            find = StoredRuns(open_store())
            if not all(find({"state": stage.state}, finished=True) for stage in stages):
                backfill_experiment(recorded)
            return
        except Exception as error:
            if not is_store_fault(error):
                raise
            if time.monotonic() > deadline:
                raise UserError(f"MLflow's store failed: {one_line(error)[:200]}") from None
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(Request.from_json(sys.argv[1])))
