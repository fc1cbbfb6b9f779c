"""Every tag that the project sets in MLflow, and what makes the tags of a run; all without MLflow.

MLflow's UI hides tags whose names begin with `mlflow.`, so those that only this project reads are named so; a query of
runs returns them as it returns all tags.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from gradtrail.stages.common.environment import RuntimeConfig
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import MEMBERS, PARAMS, SEED, flatten, load_section
from gradtrail.stages.common.pipeline_file import TRAIN, Entry, sections_of
from gradtrail.support.git import CommandError, git, head_commit
from gradtrail.support.paths import SQLITE, private_folder, root
from gradtrail.tracking.state import State
from gradtrail.tracking.working_diff import has_changes

# The table of tags: what each says; who reads it, a module or else. Of runs:
STAGE = "stage"  # name of the stage; every search
STATE = "state"  # key of the state, `State.state`; every search
TRAIN_STATE = "train_state"  # state of the training that the stage is below; `runs`, `show`
WEIGHTS = "weights"  # digest of a training's final weights, which the run wrote or read; `runs`
START = "mlflow.gradtrail.start"  # digest of the weights that a training started from; `links`
START_RUN = "start.run"  # run that wrote these weights; `show`, people
OUTS = "mlflow.gradtrail.outs"  # digests of all outputs, as JSON; `outputs`
PROCESS = "mlflow.gradtrail.process"  # host, number and start of the process that worked on it last; `is_alive`
CLONE = "mlflow.gradtrail.clone"  # id of the clone that made the run, or `SHARED`; `gc`
BEGAN = "mlflow.gradtrail.began"  # start of the last attempt, in milliseconds; `compare`
ATTEMPTS = "attempts"  # number of executions of the state; the next attempt, `diff`, `estimate`
MACHINE = "machine"  # type of the machine; the next attempt, `list_runs`, `compare`, `estimate`
JAX = "jax"  # version of JAX; people
BYTES = "bytes"  # type of machines that make the same bytes; the next attempt, `backfill`
REBUILT = "rebuilt"  # true if `gradtrail sync` made the run, no execution; `backfill`, `compare`, `diff`
REPLACED = "replaced_by"  # run that replaces this one, which is deleted; people
DATASET = "dataset"  # name of the data set; the description, `list_runs`, `show`, `compare`, `release`
DATASET_DIGEST = "dataset_digest"  # its digest; the description, `show`, `compare`, `candidate`, `models`
ALERT = "alert"  # lines about a training that diverged or stalled; people
VERDICT = "verdict"  # of a training: outcome, digests of export and limits; `release`, `registry_history`
EXPERIMENT_NAME = "dvc.exp_name"  # DVC's experiment; the description, `find_run`, `list_runs`, `show`
BASELINE = "dvc.exp_baseline"  # commit that DVC's experiment began at; `show`
COMMIT = "mlflow.source.git.commit"  # commit of the code; the description, `show`, `diff`, MLflow
DIRTY = "git.dirty"  # true if files that stages read differ from it; the description, `show`, `diff`
SOURCE = "mlflow.source.name"  # script of the stage; MLflow
USER = "mlflow.user"  # who ran it; MLflow
PARENT = "mlflow.parentRunId"  # run of the training that the run is below; `find_run`, `gc`, `backfill`, MLflow
VARIANT = "variant"  # key of a training's state without the seed, also of the parent of its seeds; `variants`
TRAININGS = "mlflow.gradtrail.trainings"  # of the parent of seeds: digest of the ids of its trainings; `variants`
NOTE = "mlflow.note.content"  # description, of a model too; `names.summary_in`, MLflow
COLOR = "mlflow.runColor"  # of a training in charts; MLflow
TABLES = "mlflow.loggedArtifacts"  # artifacts that are shown as tables, as JSON; MLflow
IMAGES = "mlflow.loggedImages"  # true if the run has images; MLflow
CONTEXT = "mlflow.data.context"  # of the run's data set: what it is used for; MLflow
# Of logged models, and of versions of registered ones:
MODEL_WEIGHTS = "weights"  # final or best; `models`
EXPORT_DIGEST = "export_digest"  # `Manifest.digest`, of a version too; `models`, `registry`, `release`
EXPORT_OUT = "export_out"  # digest of the output `models/export`, as DVC has it; `models`, `candidate`
TEMPERATURE = "temperature"  # fitted temperature; `models`
REASON = "reason"  # of a version: why it is the challenger; people
MOVE = "champion."  # of a version, with a number and a token: a move of the alias, as JSON; `release`
# Of experiments:
EXPERIMENT = "gradtrail.experiment"  # name with which it was created, as people rename them; `store`, `relocate`
EXPERIMENT_KIND = "mlflow.experimentKind"  # opens the UI for training rather than that for GenAI; MLflow
VIEW = "mlflow.sharedViewState.gradtrail"  # columns and charts of the page of trainings; MLflow

SHARED = "shared"  # value of `CLONE`


def stage_params(stage: State) -> dict[str, Any]:
    """Return the params of the stage and of all stages before it, flat: `train.mlp.hidden` → value."""
    return {key: value for name in stage.lineage for key, value in flat_params(stage.entry(name)).items()}


def flat_params(entry: Entry) -> dict[str, Any]:
    """Return the params that a stage reads, flat."""
    return flatten(sections_of(entry.params))


def param_text(value: Any) -> str:
    """Return the value of a param as text, as a run has it."""
    return "null" if value is None else str(value)


def state_tags(stage: State) -> dict[str, str]:
    """Return the tags that follow from the state and never change."""
    script, user = f"pipeline/{stage.name}.py", psutil.Process().username()  # its number if it has no name
    tags = {STAGE: stage.name, STATE: stage.state, SOURCE: script, USER: user}
    tags |= {TRAIN_STATE: stage.state_of(TRAIN)} if stage.is_below_training else {}
    entry = stage.entry(stage.name)
    tags |= {VARIANT: stage.variant} if stage.name == TRAIN and SEED in flat_params(entry) else {}
    return tags | _weights_tag(stage, entry.deps)


def output_tags(stage: State, outs: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that name the outputs of a stage, path → digest."""
    return {OUTS: json.dumps(outs, sort_keys=True)} | _weights_tag(stage, outs)


def _weights_tag(stage: State, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the tag of the weights that a stage reads or writes, if there are any."""
    final = "models/final.safetensors"
    name = final if stage_params(stage).get(MEMBERS, 1) == 1 else "models/members"  # of several members
    return {WEIGHTS: digests[name]} if final in digests else {}


def outputs(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each output of a run, by its path; empty for a run whose stage did not finish."""
    outs: dict[str, str] = json.loads(tags.get(OUTS, "{}"))
    return outs


def environment_tags(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of the environment of an attempt, as `environment.environment` returns it."""
    jax = environment["packages"].get("jax", "")
    return {MACHINE: environment["machine"], JAX: jax, BYTES: environment["bytes"]}


def origin_tags() -> dict[str, str]:
    """Return commit and experiment of the working folder, and whether stages read changes; if git fails, no commit."""
    names = {EXPERIMENT_NAME: "DVC_EXP_NAME", BASELINE: "DVC_EXP_BASELINE_REV"}
    tags = {tag: os.environ[name] for tag, name in names.items() if os.environ.get(name)}
    try:
        if commit := head_commit():
            tags |= {COMMIT: commit, DIRTY: str(has_changes()).lower()}
    except CommandError as error:
        print(f"warning: {error}; the run in MLflow names no commit", file=sys.stderr)
    return tags


def clone_id() -> str:
    """Return the random id of this clone, kept in `.gradtrail/clone`; a copy of the folder has an id of its own."""
    path = private_folder() / "clone"
    with FileLock(path.with_suffix(".lock")):
        with contextlib.suppress(OSError, ValueError):
            name, inode = path.read_text().split()
            if path.stat().st_ino == int(inode):
                return name
        name = secrets.token_hex(8)
        with atomic_file(path) as temporary:
            temporary.touch()
            temporary.write_text(f"{name} {temporary.stat().st_ino}")
        return name


def clone_tag(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tag for a run that this clone opens: its id for a new run, which has no tags, or one of its own."""
    is_own = not tags or tags.get(CLONE) == clone_id()
    return {CLONE: clone_id() if is_own else SHARED}


def process_tags() -> dict[str, str]:
    """Return the tag that identifies this process."""
    return {PROCESS: f"{socket.gethostname()}:{os.getpid()}:{_start_of(os.getpid())}"}


def is_of_this_host(tags: Mapping[str, str]) -> bool:
    """Whether the process that worked on a run was on this host."""
    return tags.get(PROCESS, "").partition(":")[0] == socket.gethostname()


def is_alive(tags: Mapping[str, str]) -> bool:
    """Whether the process of a run is on this host and still exists; another process may have its number by now."""
    if not is_of_this_host(tags):
        return False
    _, pid, start = tags[PROCESS].split(":", 2)
    try:
        # A killed process stays a zombie until its parent reads its status.
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE and _start_of(int(pid)) == start
    except psutil.Error:
        return False


def _start_of(pid: int) -> str:
    """Return the boot and the clock tick at which a process started; where the system has none, the second."""
    try:
        # psutil computes the second from the clock, which may be set meanwhile.
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{ticks}"
    except OSError:
        return f"{psutil.Process(pid).create_time():.0f}"


def experiment_name(kind: str, uri: str) -> str:
    """Return the name of the experiment for `data` or `models`: with `runtime.experiment`, or the project, before it.

    The project's name, that of git's remote `origin` or else of the root, is used on a server alone.
    """
    prefix = load_section("runtime", RuntimeConfig).experiment if PARAMS.exists() else ""
    if not (prefix or uri.startswith(SQLITE)):
        origin = git("-C", str(root()), "config", "--get", "remote.origin.url") or str(root())
        project = re.split("[/:]", origin.rstrip("/"))[-1].removesuffix(".git")
        prefix = re.sub(r"[^\w.-]+", "-", project)
    return f"{prefix}-{kind}" if prefix else kind
