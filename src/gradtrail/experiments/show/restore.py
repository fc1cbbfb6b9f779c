"""The commands that restore the files of a run's state."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlflow.entities import Run

from gradtrail.stages.common.dvc_cache import has_remote
from gradtrail.stages.common.pipeline_file import FILES, dvc_file, dvc_target
from gradtrail.support.git import git
from gradtrail.support.paths import working_folder
from gradtrail.tracking.lineage.recorded import committed_snapshots, find_experiments, has_files, working_snapshot
from gradtrail.tracking.lineage.state import Identity, Snapshot
from gradtrail.tracking.mlflow.relocate import local_path
from gradtrail.tracking.mlflow.tags import CUT_OFF, outputs

_NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class RestoreOption:
    """A way to restore the files of a state."""

    source: str  # place that the files come from: the working folder, an experiment or a commit
    commands: tuple[str, ...]  # shell commands for the repository's root, in order; empty if there is nothing to do


def restore_options(run: Run, diff: str) -> list[RestoreOption]:
    """Return the ways to restore the files of a run's state, the newest few, newest first.

    If a `dvc.lock` (of the working folder, a commit or an experiment) records the state, DVC's cache has the files.
    Otherwise `dvc repro` at the run's commit, with its uncommitted changes applied, restores them from the run-cache or
    computes the same bytes. Local changes are stashed first.

    Args:
        run: The run.
        diff: The run's artifact `git.diff`; empty if it has none.
    """
    working = working_snapshot()
    if working and _state_in(working, run):
        return [_working_folder_option(working, run)]
    snapshots = [snapshot for snapshot in committed_snapshots()[0] if _state_in(snapshot, run)]
    newest = reversed(snapshots[-_NUM_SHOWN:])
    options = [option for snapshot in newest for option in _snapshot_options(snapshot, run)] or _at_commit_of(run, diff)
    return [replace(option, commands=(*_stash(option), *option.commands)) for option in options]


def _stash(option: RestoreOption) -> tuple[str, ...]:
    """Return the command that stashes local changes; untracked files too, which `git apply` refuses to overwrite."""
    applies = any(command.startswith("git apply") for command in option.commands)
    if applies and git("status", "--porcelain"):
        return ("git stash --include-untracked",)
    return ("git stash",) if git("status", "--porcelain", "--untracked-files=no") else ()


def _state_in(snapshot: Snapshot, run: Run) -> bool:
    """Whether a snapshot records the run's state."""
    stage = Identity(run.data.tags["stage"], from_lock=True, snapshot=snapshot)
    if stage.name not in snapshot.pipeline or not stage.is_sound or stage.state != run.data.tags["state"]:
        return False
    return outputs(run.data.tags) in ({}, stage.out_digests())  # on another kind of machine they may differ


def _working_folder_option(working: Snapshot, run: Run) -> RestoreOption:
    stage = Identity(run.data.tags["stage"], from_lock=True, snapshot=working)
    is_complete = all(stage.has_outs_of_lock(name) for name in stage.lineage)
    return RestoreOption(source="the working folder", commands=() if is_complete else (_fill(stage),))


def _snapshot_options(snapshot: Snapshot, run: Run) -> Iterator[RestoreOption]:
    stage = Identity(run.data.tags["stage"], from_lock=True, snapshot=snapshot)
    experiments = find_experiments()
    if experiment := snapshot.experiment:
        is_unique = [other.name for other in experiments].count(experiment.name) == 1
        apply = f"dvc exp apply {shlex.quote(experiment.name) if is_unique else experiment.commit[:12]}"
        # If the cache lacks files, DVC names them, and the second command restores them as for a commit
        commands = (apply,) if _is_cached(stage) else (apply, _fill(stage))
        yield RestoreOption(source=f"experiment {experiment.name}", commands=commands)
    if snapshot.commit not in {other.commit for other in experiments}:
        commands = (f"git checkout {snapshot.commit[:12]}", _fill(stage))
        yield RestoreOption(source=_describe_commit(snapshot.commit), commands=commands)


def _describe_commit(commit: str) -> str:
    return f"commit of {git('log', '-1', '--format=%cs %s', commit)}"


def _fill(stage: Identity) -> str:
    """Return the command that checks out the files of a lock, or pulls or computes them if the cache lacks some.

    The command names `dvc.yaml`: otherwise DVC also requires the outputs of an optional pipeline that was ever run.
    """
    files = " ".join(dict.fromkeys([FILES[0], dvc_file(stage.name)]))
    if _is_cached(stage):
        return f"dvc checkout {files}"
    return f"dvc pull {files}" if has_remote() else _repro(stage.name)


def _repro(stage: str) -> str:
    """Return the command that runs a stage; DVC alone does not see an optional pipeline that never ran."""
    target = dvc_target(stage)
    return f"{'dvc' if target == stage else 'gradtrail'} repro {shlex.quote(target)}"


def _is_cached(stage: Identity) -> bool:
    """Whether DVC's cache or the working folder has all files of a lock; if one is missing, `dvc checkout` fails.

    Metrics files are part of a commit; without one they must be in the working folder.
    """
    snapshot = stage.snapshot
    if snapshot is None:
        return False
    files = {FILES[0], dvc_file(stage.name)}  # named by `_fill`
    names = [name for name in snapshot.pipeline if name in snapshot.lock and dvc_file(name) in files]
    stages = [Identity(name, from_lock=True, snapshot=snapshot) for name in names]
    return all(has_files(upstream, commit=snapshot.commit) for upstream in stages)


def _at_commit_of(run: Run, diff: str) -> list[RestoreOption]:
    """Return the option that runs the stage again at the run's commit, with its uncommitted changes; or none."""
    tags = run.data.tags
    commit = tags.get("mlflow.source.git.commit", "")
    if not git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        return []
    lines = diff.splitlines()
    if tags.get("git.dirty") == "true" and (not diff or any(line.startswith(CUT_OFF) for line in lines)):
        return []  # its changes are unknown
    apply = _apply_diff(run) if any(line.startswith("diff --git ") for line in lines) else ()
    commands = (f"git checkout {commit[:12]}", *apply, _repro(tags["stage"]))
    return [RestoreOption(source=_describe_commit(commit), commands=commands)]


def _apply_diff(run: Run) -> tuple[str, ...]:
    if folder := local_path(run.info.artifact_uri):
        path = folder / "git.diff"
        near = path.relative_to(working_folder()) if path.is_relative_to(working_folder()) else path
        return (f"git apply {shlex.quote(str(near))}",)
    fetch = f"mlflow artifacts download --run-id {run.info.run_id} --artifact-path git.diff --dst-path .gradtrail"
    return (fetch, "git apply .gradtrail/git.diff")
