"""The commands that restore the files of a run's state."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from mlflow.entities import Run

from gradtrail.stages.common.dvc_cache import has_remote
from gradtrail.stages.common.pipeline_file import FILES, dvc_file, dvc_target
from gradtrail.support.git import git
from gradtrail.support.paths import working_folder
from gradtrail.tracking.lineage.recorded import has_files
from gradtrail.tracking.lineage.snapshots import Snapshot, committed_snapshots, find_experiments, working_snapshot
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.relocate import local_path
from gradtrail.tracking.mlflow.tags import CUT_OFF, NOT_IN_GIT, outputs

_NUM_SHOWN = 3
_SOURCE_OF_NOISE = "train.privacy.secret_sha256"


@dataclass(frozen=True, kw_only=True)
class RestoreOption:
    """A way to restore the files of a state.

    Attributes:
        about: where the files come from.
        commands: shell commands, in order, for the repository's root; empty where there is nothing to do.
    """

    about: str
    commands: tuple[str, ...]


def restore_options(run: Run, diff: str) -> list[RestoreOption]:
    """Return the ways to restore the files of a run's state; of commits and experiments the newest few, newest first.

    If a `dvc.lock` has the state (that of the working folder, a commit or an experiment), the files come from DVC's
    cache. Otherwise `dvc repro` at the run's commit, with its uncommitted changes applied, restores them from the
    run-cache or computes the same bytes. Changes of the working folder are stashed first.

    Args:
        run: the run.
        diff: the run's artifact `git.diff`; empty if it has none.
    """
    working = working_snapshot()
    if working and _state_in(working, run):
        return [_in_working_folder(working, run)]
    snapshots = [snapshot for snapshot in committed_snapshots()[0] if _state_in(snapshot, run)]
    newest = reversed(snapshots[-_NUM_SHOWN:])
    options = [each for snapshot in newest for each in _in_snapshot(snapshot, run)] or list(_by_origin(run, diff))
    return [RestoreOption(about=each.about, commands=(*_stash(each), *each.commands)) for each in options]


def _stash(option: RestoreOption) -> tuple[str, ...]:
    """Return the command that stashes local changes; untracked files too, which `git apply` refuses to overwrite."""
    applies = any(command.startswith("git apply") for command in option.commands)
    if applies and git("status", "--porcelain"):
        return ("git stash --include-untracked",)
    return ("git stash",) if git("status", "--porcelain", "--untracked-files=no") else ()


def _state_in(snapshot: Snapshot, run: Run) -> bool:
    """Whether a snapshot has the run's state."""
    stage = Identity(run.data.tags["stage"], from_lock=True, snapshot=snapshot)
    if stage.name not in snapshot.pipeline or not stage.is_sound or stage.state != run.data.tags["state"]:
        return False
    return outputs(run.data.tags) in ({}, stage.out_digests())  # another kind of machine may have written others


def _in_working_folder(working: Snapshot, run: Run) -> RestoreOption:
    stage = Identity(run.data.tags["stage"], from_lock=True, snapshot=working)
    if all(stage.has_outs_of_lock(name) for name in stage.lineage):
        return RestoreOption(about="the working folder has it", commands=())
    return RestoreOption(about="the dvc.lock of the working folder has it", commands=(_fill(stage),))


def _in_snapshot(snapshot: Snapshot, run: Run) -> Iterator[RestoreOption]:
    stage = Identity(run.data.tags["stage"], from_lock=True, snapshot=snapshot)
    experiments = find_experiments()
    if experiment := snapshot.experiment:
        is_only_one = [one.name for one in experiments].count(experiment.name) == 1
        apply = f"dvc exp apply {shlex.quote(experiment.name) if is_only_one else experiment.commit[:12]}"
        # if the cache lacks files, DVC says which, and the second command restores them as for a commit
        yield RestoreOption(about="an experiment", commands=(apply,) if _is_here(stage) else (apply, _fill(stage)))
    if snapshot.commit not in {one.commit for one in experiments}:
        about = git("log", "-1", "--format=%cs %s", snapshot.commit)
        yield RestoreOption(
            about=f"the commit of {about}", commands=(f"git checkout {snapshot.commit[:12]}", _fill(stage))
        )


def _fill(stage: Identity) -> str:
    """Return the command that checks out the files of a lock, or pulls or computes them if the cache lacks some.

    It names the pipeline: without a name DVC asks for the outs of an optional one too, if that was ever run.
    """
    files = " ".join(dict.fromkeys([FILES[0], dvc_file(stage.name)]))
    if _is_here(stage):
        return f"dvc checkout {files}"
    return f"dvc pull {files}" if has_remote() else _repro(stage.name)


def _repro(stage: str) -> str:
    """Return the command that runs a stage; DVC alone does not see an optional pipeline that has not been run."""
    target = dvc_target(stage)
    return f"{'dvc' if target == stage else 'gradtrail'} repro {shlex.quote(target)}"


def _is_here(stage: Identity) -> bool:
    """Whether DVC's cache or the working folder has all files of a lock; if one is missing, `dvc checkout` fails.

    Metrics files are part of a commit; without one they must be in the working folder.
    """
    snapshot = stage.snapshot
    if snapshot is None:
        return False
    files = {FILES[0], dvc_file(stage.name)}  # that `_fill` names
    names = [name for name in snapshot.pipeline if name in snapshot.lock and dvc_file(name) in files]
    stages = [Identity(name, from_lock=True, snapshot=snapshot) for name in names]
    return all(has_files(one, commit=snapshot.commit) for one in stages)


def _by_origin(run: Run, diff: str) -> Iterator[RestoreOption]:
    """Yield the option that starts from the run's commit and applies its uncommitted changes."""
    tags = run.data.tags
    commit = tags.get("mlflow.source.git.commit", "")
    if not git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        return
    checkout, repro = f"git checkout {commit[:12]}", _repro(tags["stage"])
    same = "computes the same bytes"
    if run.data.params.get(_SOURCE_OF_NOISE, "None") != "None":
        same += ", with the secret of its noise"
    if tags.get("git.dirty") != "true":
        yield RestoreOption(about=f"no lock has it; its commit {same}", commands=(checkout, repro))
    elif diff and not any(line.startswith(CUT_OFF) for line in diff.splitlines()):
        about = f"no lock has it; its commit with its uncommitted changes {same}"
        untracked = [line.removeprefix(NOT_IN_GIT) for line in diff.splitlines() if line.startswith(NOT_IN_GIT)]
        about += f", unless it depends on an untracked file: {', '.join(untracked)}" if untracked else ""
        has_hunks = any(line.startswith("diff --git ") for line in diff.splitlines())
        yield RestoreOption(about=about, commands=(checkout, *(_apply_diff(run) if has_hunks else ()), repro))


def _apply_diff(run: Run) -> tuple[str, ...]:
    if folder := local_path(run.info.artifact_uri):
        path = folder / "git.diff"
        near = path.relative_to(working_folder()) if path.is_relative_to(working_folder()) else path
        return (f"git apply {shlex.quote(str(near))}",)
    fetch = f"mlflow artifacts download --run-id {run.info.run_id} --artifact-path git.diff --dst-path .gradtrail"
    return (fetch, "git apply .gradtrail/git.diff")
