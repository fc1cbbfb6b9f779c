"""Find runs in MLflow's store by name or id, by state, by DVC experiment, by commit, or by the content of a file."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from mlflow.entities import Run

from gradtrail.stages.common.files import digest
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError, one_line, suggestion
from gradtrail.support.git import git
from gradtrail.tracking.dvc_history import consistent_stages, find_experiments, snapshot_of, working_snapshot
from gradtrail.tracking.runs import RunIndex, find_equivalent_run, wrote
from gradtrail.tracking.state import RecordedState, Snapshot
from gradtrail.tracking.tags import PARENT

_COMMIT = re.compile(r"HEAD[~^\d]*|[0-9a-f]{40}")


def find_run(name: str, index: RunIndex, stage: str | None = None, *, apart: str = "state") -> Run:
    """Return the one run that a name refers to: `workspace`, a commit such as `HEAD`, or a name for `look_up`.

    If a name has runs of several stages, that of `stage` is returned, or else that of the training. What the workspace,
    a commit or a DVC experiment has of a stage is what its `dvc.lock` records. UserError, one line, if no run has the
    name, or if several have it that differ in the tag `apart`; the newest of others is returned.
    """
    commit = _commit_of_experiment(name) if stage else ""
    if name == "workspace" or commit or _COMMIT.fullmatch(name):
        snapshot = working_snapshot() if name == "workspace" else snapshot_of(commit or _commit_named(name))
        recorded = [one for one in _stages(snapshot) if one.name == (stage or TRAIN)]
        matches = [run for one in recorded if (run := find_equivalent_run(index, one))]
    else:
        matches = look_up(name, index.runs())
        if stage:
            ids = {run.info.run_id for run in matches}
            of_trainings = [run for run in index.runs() if run.data.tags.get(PARENT) in ids]
            matches = [run for run in [*matches, *of_trainings] if run.data.tags.get("stage") == stage]
    if not matches:
        remedy = f"`dvc repro {stage or TRAIN}` or `gradtrail sync` makes it, or says why not"
        raise UserError(f"{one_line(name)[:100]}: no run of the stage {stage or TRAIN}; {remedy}")
    if len({run.data.tags.get(apart) for run in matches}) > 1:
        some = ", ".join(run.info.run_id[:8] for run in matches[:8])
        raise UserError(f"{one_line(name)[:100]}: {len(matches)} runs; give the id of one: {some}")
    return matches[0]


def look_up(name: str, runs: Iterable[Run], place: Path = Path()) -> list[Run]:
    """Return the runs that a name refers to, in the order of `runs`, which are all of the store; UserError if none.

    A name is a run's id or name, a state, a prefix of an id or a state (at least four digits), the name of a DVC
    experiment, which refers to its training if it has one, or the path of a file or folder, relative to `place`, whose
    content is looked up among the outputs.
    """
    runs = [run for run in runs if "state" in run.data.tags]
    commit, is_prefix = _commit_of_experiment(name), re.fullmatch("[0-9a-f]{4,64}", name) is not None
    states = {one.state for one in _stages(snapshot_of(commit))} if commit else ()  # whichever experiment runs name

    def is_of_experiment(run: Run) -> bool:
        return run.data.tags["state"] in states or name == run.data.tags.get("dvc.exp_name")

    tests: tuple[Callable[[Run], bool], ...] = (
        lambda run: name in (run.info.run_id, run.data.tags["state"], run.info.run_name),
        lambda run: is_of_experiment(run) and run.data.tags["stage"] == TRAIN,
        is_of_experiment,
        lambda run: is_prefix and (run.info.run_id.startswith(name) or run.data.tags["state"].startswith(name)),
    )
    for test in tests:
        if matches := [run for run in runs if test(run)]:
            return matches
    if (place / name).exists():
        return _writers(place / name, runs)
    if commit:
        raise UserError(
            f"{name}: a DVC experiment without a run; `gradtrail sync` adds it once DVC's cache has its files: "
            "`dvc exp pull` fetches them from a DVC remote; without one, commit your changes, and "
            f"`dvc exp apply {name}; dvc repro` computes them"
        )
    names = {run.info.run_name for run in runs} | {run.data.tags.get("dvc.exp_name", "") for run in runs}
    raise UserError(
        f"{one_line(name)[:100]}: no run has this name, id, state or experiment, and there is no such file"
        f"{suggestion(name, names) or '; `gradtrail sync` backfills missing runs'}"
    )


def _writers(path: Path, runs: Iterable[Run]) -> list[Run]:
    """Return the runs that wrote the content of a file or folder, only those in `dvc.lock` if there are any."""
    md5 = digest(path)
    matches = [run for run in runs if wrote(run, md5)]
    if not matches:
        raise UserError(f"{path}: no run wrote these bytes (md5 {md5})")
    current = {stage.state for stage in _stages(working_snapshot())}
    return [run for run in matches if run.data.tags["state"] in current] or matches


def _commit_of_experiment(name: str) -> str:
    """Return the commit of the DVC experiment with a name; empty if there is none."""
    return next((one.commit for one in reversed(find_experiments()) if one.name == name), "")


def _commit_named(name: str) -> str:
    if commit := git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"):
        return commit
    raise UserError(f"{name}: no such commit")


def _stages(snapshot: Snapshot | None) -> list[RecordedState]:
    return [*consistent_stages(snapshot)] if snapshot else []
