"""How a person gets the files of a state back: the commands, and whether the files are here."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from mlflow.entities import Run

from gradtrail.io.dvc_cache import is_here
from gradtrail.io.git import git
from gradtrail.io.identity import Identity
from gradtrail.io.snapshots import Snapshot, committed_snapshots, find_experiments, working_snapshot
from gradtrail.io.workspace import working_folder

_NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to a state's files.

    Attributes:
        about: what it rests on.
        commands: to be typed one after another, in the repository's root; none where there is nothing to do.
    """

    about: str
    commands: tuple[str, ...]


def ways_to(row: Run) -> list[Way]:
    """Return the ways to the files of a row's state, the shortest first; of commits and experiments the newest few.

    Where a lock names the state (the working folder's, a commit's, an experiment's), DVC's cache gives exactly those
    files. Otherwise the row's commit, with what was changed since, makes the same bytes again, or DVC's run-cache has
    them.
    """
    snapshots = [snapshot for snapshot in committed_snapshots()[0] if _state_in(snapshot, row)]
    working = working_snapshot()
    ways = [_in_working_folder(row)] if working and _state_in(working, row) else []
    ways += [way for snapshot in snapshots[: -_NUM_SHOWN - 1 : -1] for way in _in_snapshot(snapshot, row)]
    return ways or list(_by_origin(row))


def _state_in(snapshot: Snapshot, row: Run) -> Identity | None:
    """Return the stage of a snapshot whose state is the row's, if it has it."""
    stage = Identity(row.data.tags["stage"], from_lock=True, snapshot=snapshot)
    is_it = stage.name in snapshot.pipeline and stage.is_sound and stage.state == row.data.tags["state"]
    return stage if is_it else None


def _in_working_folder(row: Run) -> Way:
    stage = Identity(row.data.tags["stage"], from_lock=True)
    if all(stage.has_outs_of_lock(name) for name in stage.lineage):
        return Way(about="the working folder has it", commands=())
    return Way(about="the dvc.lock of the working folder names it", commands=(_fill(stage),))


def _in_snapshot(snapshot: Snapshot, row: Run) -> Iterator[Way]:
    stage = Identity(row.data.tags["stage"], from_lock=True, snapshot=snapshot)
    if snapshot.experiment:
        name = shlex.quote(snapshot.experiment.name)
        pull = () if _fill(stage) == "dvc checkout" else (f"dvc exp pull origin {name}",)
        yield Way(about="an experiment", commands=(*pull, f"dvc exp apply {name}"))
    if snapshot.commit not in {experiment.commit for experiment in find_experiments()}:
        about = git("log", "-1", "--format=%cs %s", snapshot.commit)
        commands = (f"git checkout {snapshot.commit[:12]}", _fill(stage))
        yield Way(about=f"the commit of {about}", commands=commands)


def _fill(stage: Identity) -> str:
    """Return the command that puts the files of a lock in their places."""
    identities = [Identity(name, from_lock=True, snapshot=stage.snapshot) for name in stage.lineage]
    metrics = {f"metrics/{name}.json" for name in stage.lineage}  # which are git's
    outs = [pair for one in identities for pair in one.out_digests().items() if pair[0] not in metrics]
    return "dvc checkout" if all(is_here(out, md5) for out, md5 in outs) else "dvc pull"


def _by_origin(row: Run) -> Iterator[Way]:
    """Yield the way by the commit at which the state was made, and what was changed since."""
    tags = row.data.tags
    commit = tags.get("mlflow.source.git.commit", "")
    if not git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        return
    is_dirty = tags.get("git.dirty") == "true"
    apply = _apply_diff(row) if is_dirty else ()
    about = "no lock names it, but the commit" + (" and the change that it was made with" if is_dirty else "")
    commands = (f"git checkout {commit[:12]}", *apply, f"dvc repro {tags['stage']}")
    yield Way(about=f"{about} give the same bytes" if is_dirty else f"{about} gives the same bytes", commands=commands)


def _apply_diff(row: Run) -> tuple[str, ...]:
    folder = urlsplit(row.info.artifact_uri)
    if folder.scheme in ("", "file"):
        path = Path(url2pathname(folder.path)) / "git.diff"
        near = path.relative_to(working_folder()) if path.is_relative_to(working_folder()) else path
        return (f"git apply {shlex.quote(str(near))}",)
    return (
        f"mlflow artifacts download --run-id {row.info.run_id} --artifact-path git.diff --dst-path .gradtrail",
        "git apply .gradtrail/git.diff",
    )
