"""How a person gets the files of a state back: the commands, and what they rest on."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from mlflow.entities import Run

from gradtrail.support.git import git
from gradtrail.support.paths import working_folder
from gradtrail.tracking.lineage.dvc_cache import has_remote
from gradtrail.tracking.lineage.recorded import has_files
from gradtrail.tracking.lineage.snapshots import Snapshot, committed_snapshots, find_experiments, working_snapshot
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.relocate import local_path
from gradtrail.tracking.mlflow.tags import CUT_OFF, NOT_IN_GIT

_NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class RestoreOption:
    """A way to a state's files.

    Attributes:
        about: what it rests on.
        commands: to be typed one after another, in the repository's root; none where there is nothing to do.
    """

    about: str
    commands: tuple[str, ...]


def ways_to(row: Run, diff: str) -> list[RestoreOption]:
    """Return the ways to the files of a row's state, the shortest first; of commits and experiments the newest few.

    Where a lock names the state (the working folder's, a commit's, an experiment's), DVC's cache gives exactly those
    files. Otherwise the row's commit, with what was changed since, makes the same bytes again, or DVC's run-cache has
    them. What is changed in the working folder is stashed first: git would keep it, or refuse.

    Args:
        row: of the state.
        diff: the row's artifact `git.diff`; empty where it has none.
    """
    working = working_snapshot()
    if working and _state_in(working, row):
        return [_in_working_folder(working, row)]
    snapshots = [snapshot for snapshot in committed_snapshots()[0] if _state_in(snapshot, row)]
    newest = reversed(snapshots[-_NUM_SHOWN:])
    ways = [way for snapshot in newest for way in _in_snapshot(snapshot, row)] or list(_by_origin(row, diff))
    return [RestoreOption(about=way.about, commands=(*_stash(way), *way.commands)) for way in ways]


def _stash(way: RestoreOption) -> tuple[str, ...]:
    """Return the command that stashes what a way would overwrite; `git apply` refuses to overwrite untracked files."""
    applies = any(command.startswith("git apply") for command in way.commands)
    if applies and git("status", "--porcelain"):
        return ("git stash --include-untracked",)
    return ("git stash",) if git("status", "--porcelain", "--untracked-files=no") else ()


def _state_in(snapshot: Snapshot, row: Run) -> bool:
    """Whether a snapshot has the row's state."""
    stage = Identity(row.data.tags["stage"], from_lock=True, snapshot=snapshot)
    return stage.name in snapshot.pipeline and stage.is_sound and stage.state == row.data.tags["state"]


def _in_working_folder(working: Snapshot, row: Run) -> RestoreOption:
    stage = Identity(row.data.tags["stage"], from_lock=True, snapshot=working)
    if all(stage.has_outs_of_lock(name) for name in stage.lineage):
        return RestoreOption(about="the working folder has it", commands=())
    return RestoreOption(about="the dvc.lock of the working folder names it", commands=(_fill(stage),))


def _in_snapshot(snapshot: Snapshot, row: Run) -> Iterator[RestoreOption]:
    stage = Identity(row.data.tags["stage"], from_lock=True, snapshot=snapshot)
    experiments = find_experiments()
    if experiment := snapshot.experiment:
        is_only_one = [one.name for one in experiments].count(experiment.name) == 1
        apply = f"dvc exp apply {shlex.quote(experiment.name) if is_only_one else experiment.commit[:12]}"
        # what it applies is in the cache, or DVC says what is not; then the rest comes as for a commit
        yield RestoreOption(about="an experiment", commands=(apply,) if _is_here(stage) else (apply, _fill(stage)))
    if snapshot.commit not in {one.commit for one in experiments}:
        about = git("log", "-1", "--format=%cs %s", snapshot.commit)
        yield RestoreOption(
            about=f"the commit of {about}", commands=(f"git checkout {snapshot.commit[:12]}", _fill(stage))
        )


def _fill(stage: Identity) -> str:
    """Return the command that puts the files of a lock in their places, or makes them again where they are nowhere."""
    if _is_here(stage):
        return "dvc checkout"
    return "dvc pull" if has_remote() else f"dvc repro {stage.name}"


def _is_here(stage: Identity) -> bool:
    """Whether DVC's cache, or the working folder, has all that a lock names: with less, `dvc checkout` ends in a fault.

    Metrics files come with a commit; without one they have to be there.
    """
    snapshot = stage.snapshot
    if snapshot is None:
        return False
    stages = [Identity(name, from_lock=True, snapshot=snapshot) for name in snapshot.pipeline if name in snapshot.lock]
    return all(has_files(one, but_metrics=snapshot.commit != "") for one in stages)


def _by_origin(row: Run, diff: str) -> Iterator[RestoreOption]:
    """Yield the way by the commit at which the state was made, and what was changed since."""
    tags = row.data.tags
    commit = tags.get("mlflow.source.git.commit", "")
    if not git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        return
    checkout, make = f"git checkout {commit[:12]}", f"dvc repro {tags['stage']}"
    if tags.get("git.dirty") != "true":
        yield RestoreOption(about="no lock names it; its commit makes the same bytes", commands=(checkout, make))
    elif diff and not any(line.startswith(CUT_OFF) for line in diff.splitlines()):
        about = "no lock names it; its commit and the change since make the same bytes"
        untracked = [line.removeprefix(NOT_IN_GIT) for line in diff.splitlines() if line.startswith(NOT_IN_GIT)]
        about += f", unless a file that git did not know had a part: {', '.join(untracked)}" if untracked else ""
        has_hunks = any(line.startswith("diff --git ") for line in diff.splitlines())
        yield RestoreOption(about=about, commands=(checkout, *(_apply_diff(row) if has_hunks else ()), make))


def _apply_diff(row: Run) -> tuple[str, ...]:
    if folder := local_path(row.info.artifact_uri):
        path = folder / "git.diff"
        near = path.relative_to(working_folder()) if path.is_relative_to(working_folder()) else path
        return (f"git apply {shlex.quote(str(near))}",)
    fetch = f"mlflow artifacts download --run-id {row.info.run_id} --artifact-path git.diff --dst-path .gradtrail"
    return (fetch, "git apply .gradtrail/git.diff")
