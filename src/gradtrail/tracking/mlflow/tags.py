"""What a row in MLflow is called and labelled with: all that can be said without MLflow."""

import getpass
import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil

from gradtrail.stages.common.overrides import PARAMS, flatten
from gradtrail.stages.common.pipeline_file import TRAIN, Entry
from gradtrail.support.git import git, git_bytes
from gradtrail.tracking.lineage.state import Identity

NOT_IN_GIT, CUT_OFF = "# not in git: ", "# cut off here"  # lines of an artifact `git.diff` that are no diff
_CHANGED_BY_STAGES = (":(exclude)dvc.lock", ":(exclude)metrics")
_FOR_GIT_APPLY = ("--binary", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
_MAX_DIFF_BYTES = 2**20
_CLOCK_SECONDS = 10  # by which two readings of when a process started may differ


def run_name(stage: Identity) -> str:
    """Name a row so that a person can read it, such as `mlp-256-128 adamw warmup_cosine float32 mnist`."""
    params = stage_params(stage)
    match stage.name:
        case "fetch" | "preprocess":
            return f"{stage.name} {params['fetch.dataset']}"
        case "train":
            how = [params[f"train.{part}"] for part in ("optimizer", "schedule", "precision")]
            return " ".join([_model_name(params), *how, params["fetch.dataset"]])
        case "profile" | "report":
            return f"{stage.name} {_model_name(params)} {params['train.optimizer']} {params['train.precision']}"
    return f"{stage.name} {params[f'{stage.name}.weights']}"


def _model_name(params: Mapping[str, Any]) -> str:
    kind = params["train.model"]
    widths = [*params.get(f"train.{kind}.channels", []), *params.get(f"train.{kind}.hidden", [])]
    return "-".join([kind, *map(str, widths)])


def stage_params(stage: Identity) -> dict[str, Any]:
    """Return the params of the stage and of all stages before it, flat: `train.mlp.hidden` → value."""
    return {key: value for name in stage.lineage for key, value in flat_params(stage.entry(name)).items()}


def flat_params(entry: Entry) -> dict[str, Any]:
    """Return the params that a stage reads, flat."""
    return flatten(entry.params.get(str(PARAMS), {}))


def shown(value: Any) -> str:
    """Return a param's value as a row has it."""
    return "null" if value is None else str(value)


def state_tags(stage: Identity) -> dict[str, str]:
    """Return the tags that follow from the state, and stay as they are for the life of a row."""
    entry = stage.entry(stage.name)
    tags = {"stage": stage.name, "state": stage.state, "entry": stage.entry_key, "code": entry.code_digest}
    tags |= {"mlflow.source.name": f"pipeline/{stage.name}.py", "mlflow.user": _user()}
    return tags | input_tags(entry) | ({"train_state": stage.state_of(TRAIN)} if stage.is_below_training else {})


def input_tags(entry: Entry) -> dict[str, str]:
    """Return a tag for each file or folder of data that was read."""
    return {f"input/{dep}": found for dep, found in entry.data.items()}


def process_tags() -> dict[str, str]:
    """Return which process is at work on a row."""
    started = int(psutil.Process().create_time())
    return {"process": f"{socket.gethostname()}:{os.getpid()}", "process.started": str(started)}


def is_of_this_host(tags: Mapping[str, str]) -> bool:
    """Whether the process that worked on a row was one of this host."""
    return tags.get("process", "").rpartition(":")[0] == socket.gethostname()


def is_alive(tags: Mapping[str, str]) -> bool:
    """Whether the process that worked on a row is one of this host and still there, not another with its number."""
    if not is_of_this_host(tags):
        return False
    try:
        started = psutil.Process(int(tags["process"].rpartition(":")[2])).create_time()
    except (psutil.Error, ValueError):
        return False
    return abs(started - float(tags.get("process.started", started))) < _CLOCK_SECONDS


def origin_tags() -> dict[str, str]:
    """Return of what commit and experiment the working folder is, and whether it was changed since in what matters."""
    names = {"dvc.exp_name": "DVC_EXP_NAME", "dvc.exp_baseline": "DVC_EXP_BASELINE_REV"}
    tags = {tag: os.environ[name] for tag, name in names.items() if os.environ.get(name)}
    commit = git("rev-parse", "HEAD")
    if commit:
        tags |= {"mlflow.source.git.commit": commit, "git.dirty": str(bool(_changes())).lower()}
    return tags


def working_diff() -> str:
    """Return what was changed since the commit, without what stages change themselves, cut off after 1 MiB."""
    new = "".join(f"{NOT_IN_GIT}{line[3:]}\n" for line in _changes().splitlines() if line.startswith("??"))
    diff = new.encode() + git_bytes("diff", *_FOR_GIT_APPLY, "HEAD", "--", ".", *_CHANGED_BY_STAGES)
    cut = f"\n{CUT_OFF}\n" if len(diff) > _MAX_DIFF_BYTES else ""
    return diff[: _MAX_DIFF_BYTES - len(cut)].decode(errors="ignore") + cut


def _changes() -> str:
    """Return git's list of changed files, but `dvc.lock` and `metrics/`, which stages change themselves."""
    return git("status", "--porcelain", "--", ".", *_CHANGED_BY_STAGES)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        return str(os.getuid())
