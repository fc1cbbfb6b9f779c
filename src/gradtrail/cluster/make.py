"""Runs one experiment on this machine and publishes it: plain code that does not import Ray.

The order makes a kill at any moment harmless: files and run-cache go to the DVC remote, runs to MLflow, and the push of
the experiment's ref comes last. Only an experiment with a ref counts as done. If two jobs run the same experiment at
the same time, both compute the same bytes, and the first push decides whose ref is published.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from gradtrail.cluster.checkout import NodeFolder, node_folder
from gradtrail.cluster.child import DvcRun
from gradtrail.cluster.records import ensure_runs
from gradtrail.cluster.refs import create_ref, experiment_ref, read_refs
from gradtrail.cluster.request import Experiment, Request
from gradtrail.stages.common.pipeline_file import read_pipeline, stages_before
from gradtrail.support.errors import UserError, redacted
from gradtrail.support.git import CommandError, reason, run, strict_git, with_interpreter
from gradtrail.tracking import state

_STORE_SECONDS = 900.0  # longest wait for an MLflow server that is down
_LAST_LINES = 40  # lines of output that are searched for the reason of a failure
_ENV_PREFIXES_TO_DROP = (  # variables of Ray, and of a DVC that runs this process
    "RAY_",
    "DVC_ROOT",
    "DVC_STAGE",
    "DVC_EXP_",
    "OMP_NUM_THREADS",
    "MLFLOW_RUN_ID",
)

Outcome = Literal["made", "there", "unchanged"]


def make_experiment(request: Request, experiment: Experiment) -> Outcome:
    """Run an experiment and publish it, unless its ref exists.

    Returns:
        The outcome. `made`: this call published it. `there`: its ref exists already. `unchanged`: the commit itself is
        this experiment.

    Raises:
        UserError: A step failed; nothing is published, and the same call can be repeated.
    """
    node = node_folder(request.git_url)
    node.require(request.commit)
    ref = experiment_ref(request.commit, experiment.name)
    if read_refs(request.git_url, [ref]):
        return "there"
    is_remote = request.cache is None
    with node.checkout(request.commit, Path(request.cache) if request.cache else None) as folder:
        env = _environment(folder, request)
        if is_remote:
            _fetch(node, folder, experiment.stage, request.commit, env)
        dvc_run = DvcRun(
            name=experiment.name,
            ref=ref,
            options=experiment.options,
            stage=experiment.stage,
            pull=is_remote and bool(experiment.shared),  # another experiment may have made those states since
            push=is_remote,
        )
        _run_child(dvc_run, folder, env)
        try:
            made = strict_git("rev-parse", "--verify", ref, folder=folder)
        except CommandError:
            return "unchanged"
        recorded = state.Experiment(name=experiment.name, baseline=request.commit, commit=made)
        pipeline = read_pipeline(folder / "dvc.yaml")
        stages = [*stages_before(experiment.stage, pipeline), experiment.stage][-1 - len(experiment.shared) :]
        ensure_runs(env, folder, recorded, stages, patience=_STORE_SECONDS)
        return "made" if create_ref(request.git_url, ref, made, folder) else "there"


def _fetch(node: NodeFolder, folder: Path, stage: str, commit: str, env: Mapping[str, str]) -> None:
    """Fetch what the commit's stages read and wrote from the DVC remote into the node's cache, once per node.

    Args:
        node: Node whose cache is filled.
        folder: Checkout of the commit.
        stage: Last stage to run.
        commit: Hash of the commit.
        env: Environment of DVC.
    """
    if not (folder / "dvc.lock").is_file():
        return
    fetched = node.path / f"fetched-{commit[:16]}-{stage}"
    with node.lock(fetched.name):
        if fetched.exists():
            return
        # Without `--quiet`, with which DVC does not print why it failed
        command = [sys.executable, "-m", "dvc", "fetch", "--run-cache", "--with-deps", stage]
        try:
            run(command, folder=folder, env=env, seconds=None)  # no limit: a data set may be large
        except CommandError as error:
            why = reason(error.output) if error.output.strip() else error
            raise UserError(f"the inputs of {commit[:12]} were not fetched: {why}") from None
        fetched.touch()


def _run_child(dvc_run: DvcRun, folder: Path, env: Mapping[str, str]) -> None:
    """Run an experiment in a child process, which ends if this process ends."""
    pipe = subprocess.PIPE
    last: list[str] = []
    with subprocess.Popen(
        dvc_run.command,
        cwd=folder,
        env=env,
        text=True,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout or ():
                print(redacted(line), end="", flush=True)
                last = [*last[-_LAST_LINES:], line]
            process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise UserError(reason("".join(last)))


def _environment(folder: Path, request: Request) -> dict[str, str]:
    """Return the environment of DVC and the stages: this process's, with the checkout's code and MLflow's store."""
    env = {name: value for name, value in with_interpreter().items() if not name.startswith(_ENV_PREFIXES_TO_DROP)}
    switches = {"DVC_NO_ANALYTICS": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return env | switches | {"PYTHONPATH": str(folder / "src"), "MLFLOW_TRACKING_URI": request.tracking_uri}
