"""The tags and params of a run, and the diff of its working folder, without MLflow.

MLflow's UI hides tags whose names begin with `mlflow.`, so those that only this project reads are named so; a query of
runs returns them as it returns all tags.
"""

import colorsys
import getpass
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from gradtrail.stages.common.params import MEMBERS, PARAMS, SEED, flatten
from gradtrail.stages.common.pipeline_file import TRAIN, Entry
from gradtrail.support.git import CommandError, git, git_bytes, head_commit
from gradtrail.tracking.state import Identity

# Beginnings of lines in `git.diff` that are not part of the diff
NOT_IN_GIT, CUT_OFF = "# not in git: ", "# cut off here"
WEIGHTS = "weights"  # tag: digest of a training's final weights
ALERT = "alert"  # tag: lines about a training that diverged or stalled
OUTS = "mlflow.gradtrail.outs"  # tag: digests of all outputs, as JSON
PROCESS = "mlflow.gradtrail.process"  # tag: host, number and start of the process that worked on the run last
REBUILT, REPLACED, BYTES = "rebuilt", "replaced_by", "bytes"
PARENT = "mlflow.parentRunId"
VARIANT = "variant"  # tag of a training: key of its state without the seed; also of the parent of such trainings
SEEDS = "seeds"  # tag of the parent of trainings that differ only in the seed: how many there are
BEGAN = "mlflow.gradtrail.began"  # tag: start of the last attempt, in milliseconds
_FINAL = "models/final.safetensors"
_MEMBER_WEIGHTS = "models/members"  # with several members, their digest identifies the weights
# What stages read of git's files, without what they change: no other file restores a run, and one may be a secret
_READ = ("src", "pipeline", "dvc.yaml", "params.yaml")
_READ_BY_STAGES = (*_READ, ":(exclude,glob)pipeline/**/dvc.lock", ":(exclude,glob)pipeline/**/.dvcignore")
_FOR_GIT_APPLY = ("--binary", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
_MAX_DIFF_BYTES = 2**24
_NEW_ALERT = re.compile(rb"(?m)^(\+ *alert: *)\S.*$")  # `runtime.alert` may have an address or a token that is a secret
_MAX_UNTRACKED_BYTES = 2**17  # larger files are data rather than code


def stage_params(stage: Identity) -> dict[str, Any]:
    """Return the params of the stage and of all stages before it, flat: `train.mlp.hidden` → value."""
    return {key: value for name in stage.lineage for key, value in flat_params(stage.entry(name)).items()}


def flat_params(entry: Entry) -> dict[str, Any]:
    """Return the params that a stage reads, flat."""
    return flatten(entry.params.get(str(PARAMS), {}))


def param_text(value: Any) -> str:
    """Return the value of a param as text, as a run has it."""
    return "null" if value is None else str(value)


def state_tags(stage: Identity) -> dict[str, str]:
    """Return the tags that follow from the state and never change."""
    entry = stage.entry(stage.name)
    tags = {"stage": stage.name, "state": stage.state}
    tags |= {"mlflow.source.name": f"pipeline/{stage.name}.py", "mlflow.user": _user()}
    tags |= _weights_tag(stage, entry.deps)
    tags |= {"train_state": stage.state_of(TRAIN)} if stage.is_below_training else {}
    tags |= {VARIANT: stage.variant} if stage.name == TRAIN and SEED in flat_params(entry) else {}
    return tags | {"mlflow.runColor": _color(tags.get("train_state", stage.state))}


def _color(state: str) -> str:
    """Return a color for charts that follows from a state; dark enough for MLflow's white page."""
    number = int(state[:8], 16)
    rgb = colorsys.hls_to_rgb(number % 360 / 360, (0.35, 0.5, 0.65)[number // 360 % 3], 0.75)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def output_tags(stage: Identity, outs: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that name the outputs of a stage, path → digest."""
    return {OUTS: json.dumps(outs, sort_keys=True)} | _weights_tag(stage, outs)


def _weights_tag(stage: Identity, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the tag of the weights that a stage reads or writes, if there are any."""
    if _FINAL not in digests:
        return {}
    is_single = str(stage_params(stage).get(MEMBERS, 1)) == "1"
    return {WEIGHTS: digests[_FINAL if is_single else _MEMBER_WEIGHTS]}


def outputs(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each output of a run, by its path; empty for a run whose stage did not finish."""
    outs: dict[str, str] = json.loads(tags.get(OUTS, "{}"))
    return outs


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


def origin_tags() -> dict[str, str]:
    """Return commit and experiment of the working folder, and whether stages read changes; if git fails, no commit."""
    names = {"dvc.exp_name": "DVC_EXP_NAME", "dvc.exp_baseline": "DVC_EXP_BASELINE_REV"}
    tags = {tag: os.environ[name] for tag, name in names.items() if os.environ.get(name)}
    try:
        if commit := head_commit():
            is_dirty = git("status", "--porcelain", "--", *_READ_BY_STAGES) != ""
            tags |= {"mlflow.source.git.commit": commit, "git.dirty": str(is_dirty).lower()}
    except CommandError as error:
        print(f"warning: {error}; the run in MLflow names no commit", file=sys.stderr)
    return tags


def write_diff(path: Path) -> bool:
    """Write the changes since the commit as bytes, as source files need not be UTF-8; return False if git fails."""
    try:
        path.write_bytes(working_diff())
    except CommandError as error:
        print(f"warning: {error}; the run in MLflow has no git.diff", file=sys.stderr)
        return False
    return True


def working_diff() -> bytes:
    """Return the changes since the commit of what stages read, in the form of `git apply`.

    Small untracked text files are in it as new files, unless their name begins with a dot; other untracked files are
    named in lines that begin with `NOT_IN_GIT`. More than 16 MiB of changes are left out, with a line that begins with
    `CUT_OFF`.
    """
    listed = git_bytes("ls-files", "--others", "--exclude-standard", "-z", "--", *_READ_BY_STAGES)
    untracked = [name for name in listed.split(b"\0") if name]
    text = [name for name in untracked if _is_source(Path(os.fsdecode(name)))]
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"  # a copy with the new files; git's own index does not change
        with_index = {"GIT_INDEX_FILE": str(index)}
        shutil.copy2(git("rev-parse", "--git-path", "index"), index)
        if text:
            add = ("--literal-pathspecs", "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
            git_bytes(*add, stdin=b"\0".join(text), env=with_index)
        diff = git_bytes("diff", *_FOR_GIT_APPLY, "HEAD", "--", *_READ_BY_STAGES, env=with_index)
    diff = _NEW_ALERT.sub(rb"\1''", diff)
    if len(diff) > _MAX_DIFF_BYTES:
        diff = f"{CUT_OFF}: {len(diff)} bytes of changes\n".encode()
    return b"".join(NOT_IN_GIT.encode() + name + b"\n" for name in untracked if name not in text) + diff


def is_cut_off(diff: str) -> bool:
    """Whether a `git.diff` lacks the changes, as they were too many."""
    return any(line.startswith(CUT_OFF) for line in diff.splitlines())


def _is_source(path: Path) -> bool:
    """Whether an untracked file is small, text and not hidden."""
    is_file = path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_UNTRACKED_BYTES
    return is_file and not path.name.startswith(".") and b"\0" not in path.read_bytes()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        return str(os.getuid())
