"""Makes one experiment on whatever machine this is, once in all: plain code that knows no Ray.

Whoever asks for the experiment first gets a lease on its state; who comes later waits for the holder to end, or is told
that it is busy. The order is what makes a kill at any moment harmless: files and run-cache go to the DVC remote, runs
to MLflow, and last of all, in one push, the experiment's ref, with which the experiment counts as made.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradtrail.cluster.task.checkout import NodeFolder, node_folder
from gradtrail.cluster.task.child import Orders
from gradtrail.cluster.task.lease import PACE, Lease, Pace, acquire
from gradtrail.cluster.task.records import ensure_runs
from gradtrail.cluster.task.refs import SharedRefs
from gradtrail.cluster.task.request import Experiment, Request
from gradtrail.cluster.task.shell import CommandError, git, reason, run
from gradtrail.stages.common.pipeline_file import read_pipeline, stages_before
from gradtrail.support.errors import UserError
from gradtrail.support.interpreter import with_this_interpreter
from gradtrail.support.secrets import redacted
from gradtrail.tracking.lineage import snapshots

_DONE = "refs/gradtrail/made/"  # prefix of refs of states that others share, to the experiment that made them
_NOT_OURS = (
    "RAY_",
    "DVC_ROOT",
    "DVC_STAGE",
    "DVC_EXP_",
    "OMP_NUM_THREADS",
    "MLFLOW_RUN_ID",
)  # of Ray, of a DVC around it
_LAST_LINES = 40

Made = Literal["made", "there", "unchanged", "busy"]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for others, in seconds.

    Attributes:
        lease: how leases are kept.
        store: for an MLflow server that is away.
    """

    lease: Pace = PACE
    store: float = 900.0


def make_experiment(request: Request, experiment: Experiment, patience: Patience | None = None) -> Made:
    """Make an experiment, unless it is there.

    Returns:
        `made`: by this call. `there`: it was made before. `unchanged`: the commit itself is this experiment. `busy`:
        someone else is making it, or a state that it needs; ask again later.

    Raises:
        UserError: one line; nothing of the experiment is published, and the same call goes on afterwards.
    """
    patience = patience or Patience()
    node = node_folder(request.git_url)
    node.require(request.commit)
    refs = SharedRefs(request.git_url, node.clone)
    ref, marks = experiment_ref(request.commit, experiment.name), [f"{_DONE}{key}" for key in experiment.shared]
    there = refs.read([ref, *marks])
    if ref in there:
        return "there"
    open_keys = [mark.removeprefix(_DONE) for mark in marks if mark not in there]
    lease = acquire(refs, [*open_keys, experiment.name], patience.lease)
    if lease is None:
        return "busy"
    try:
        now = refs.read([ref, *marks])  # what others made while this waited for their lease
        if ref in now:
            return "there"
        if any(f"{_DONE}{key}" in now for key in open_keys):
            return "busy"  # not this one's to make any more
        return _make(request, experiment, node, lease, needs_others=len(open_keys) < len(marks), patience=patience)
    finally:
        lease.release()


def experiment_ref(commit: str, name: str) -> str:
    """Return the ref by which DVC knows an experiment of a commit."""
    return f"refs/exps/{commit[:2]}/{commit[2:]}/{name}"


def _make(
    request: Request, experiment: Experiment, node: NodeFolder, lease: Lease, *, needs_others: bool, patience: Patience
) -> Made:
    """Make an experiment under a lease."""
    is_remote = request.cache is None
    ref = experiment_ref(request.commit, experiment.name)
    with node.checkout(request.commit, Path(request.cache) if request.cache else None) as folder:
        env = _environment(folder, request)
        if is_remote:
            _fetch(node, folder, experiment.stage, request.commit, env, again=needs_others)
        orders = Orders(
            name=experiment.name,
            ref=ref,
            options=experiment.options,
            stage=experiment.stage,
            pull=is_remote and needs_others,
            push=is_remote,
        )
        _run_child(orders, folder, env, lease)
        try:
            made = git("rev-parse", "--verify", ref, folder=folder)
        except CommandError:
            return "unchanged"
        known = snapshots.Experiment(name=experiment.name, baseline=request.commit, commit=made)
        pipeline = read_pipeline(folder / "dvc.yaml")
        stages = [*stages_before(experiment.stage, pipeline), experiment.stage][-1 - len(experiment.shared) :]
        ensure_runs(env, folder, known, stages, patience=patience.store)
        marks = {f"{_DONE}{key}": made for key in lease.keys if key in experiment.shared}
        lease.publish({ref: made, **marks}, SharedRefs(request.git_url, folder))
    return "made"


def _fetch(node: NodeFolder, folder: Path, stage: str, commit: str, env: Mapping[str, str], *, again: bool) -> None:
    """Get what the commit's stages read and wrote from the DVC remote into the node's cache, once on a node.

    Args:
        node: with the cache.
        folder: a checkout of the commit.
        stage: the last one that is run.
        commit: its hash.
        env: of DVC.
        again: whether the run-cache is wanted as it is now, with the states that others have made since.
    """
    if not (folder / "dvc.lock").is_file():
        return
    fetched = node.path / f"fetched-{commit[:16]}-{stage}"
    with node.lock(fetched.name):
        if fetched.exists() and not again:
            return
        # Without `--quiet`, with which DVC does not say why it failed
        command = [sys.executable, "-m", "dvc", "fetch", "--run-cache", "--with-deps", stage]
        try:
            run(command, folder=folder, env=env, seconds=None)  # a data set takes as long as it takes
        except CommandError as error:
            said = reason(error.output) if error.output.strip() else error
            raise UserError(f"the inputs of {commit[:12]} were not fetched: {said}") from None
        fetched.touch()


def _run_child(orders: Orders, folder: Path, env: Mapping[str, str], lease: Lease) -> None:
    """Run an experiment in a process of its own, which ends with this one, or at once where the lease is lost."""
    pipe = subprocess.PIPE
    last: list[str] = []
    with subprocess.Popen(
        orders.command,
        cwd=folder,
        env=env,
        text=True,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            with lease.guarding(lambda: _kill(process)):
                for line in process.stdout or ():
                    print(redacted(line), end="", flush=True)
                    last = [*last[-_LAST_LINES:], line]
                process.wait()
        finally:
            _kill(process)
    if process.returncode:
        raise UserError(reason("".join(last)))


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _environment(folder: Path, request: Request) -> dict[str, str]:
    """Return the environment of DVC and the stages: this process's, with the checkout's code and MLflow's store."""
    kept = {name: value for name, value in with_this_interpreter().items() if not name.startswith(_NOT_OURS)}
    switches = {"DVC_NO_ANALYTICS": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return kept | switches | {"PYTHONPATH": str(folder / "src"), "MLFLOW_TRACKING_URI": request.tracking_uri}
