"""Find runs in MLflow's store by name or id, by state, by DVC experiment, by commit, or by the content of a file."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from mlflow.entities import Run

from gradtrail.stages.common.dvc_cache import listing
from gradtrail.stages.common.files import digest
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError, one_line, suggestion
from gradtrail.support.git import git
from gradtrail.tracking.recorded import consistent_stages, find_experiments, snapshot_of, working_snapshot
from gradtrail.tracking.runs import PARENT
from gradtrail.tracking.state import Snapshot
from gradtrail.tracking.tags import outputs

_PREFIX = re.compile("[0-9a-f]{4,64}")  # of an id or a state
_COMMIT = re.compile(r"HEAD[~^\d]*|[0-9a-f]{40}")


def find_run(name: str, runs: list[Run], stage: str | None = None) -> Run:
    """Return the one run that a name refers to: `workspace`, `HEAD` or another commit, or a name for `look_up`.

    If a name has runs of several stages, that of `stage` is returned, or else that of the training. UserError, one
    line, if no run or more than one has the name.
    """
    if name == "workspace" or _COMMIT.fullmatch(name):
        return _run_of_commit(name, runs, stage or TRAIN)
    matches = look_up(name, runs)
    if stage:
        ids = {run.info.run_id for run in matches}
        of_trainings = [run for run in runs if run.data.tags.get(PARENT) in ids]
        matches = [run for run in [*matches, *of_trainings] if run.data.tags.get("stage") == stage]
    if not matches:
        raise UserError(f"{one_line(name)[:100]}: no run of the stage {stage}")
    if len({run.data.tags["state"] for run in matches}) > 1:
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
    commits = [experiment.commit for experiment in find_experiments() if experiment.name == name]
    states = _states(snapshot_of(commits[-1])).values() if commits else ()  # whichever experiment their runs name

    def is_of_experiment(run: Run) -> bool:
        return run.data.tags["state"] in states or name == run.data.tags.get("dvc.exp_name")

    tests: list[Callable[[Run], bool]] = [
        lambda run: name in (run.info.run_id, run.data.tags["state"], run.info.run_name),
        lambda run: is_of_experiment(run) and run.data.tags["stage"] == TRAIN,
        is_of_experiment,
    ]
    if _PREFIX.fullmatch(name):
        tests.append(lambda run: run.info.run_id.startswith(name) or run.data.tags["state"].startswith(name))
    for test in tests:
        if matches := [run for run in runs if test(run)]:
            return matches
    path = place / name
    if path.exists():
        return _writers(path, runs)
    if commits:
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

    def wrote(run: Run) -> bool:
        outs = outputs(run.data.tags).values()
        return md5 in outs or any(md5 in (listing(out) or {}).values() for out in outs if out.endswith(".dir"))

    matches = [run for run in runs if wrote(run)]
    if not matches:
        raise UserError(f"{path}: no run wrote these bytes (md5 {md5})")
    current = _states(working_snapshot()).values()
    return [run for run in matches if run.data.tags["state"] in current] or matches


def _run_of_commit(name: str, runs: list[Run], stage: str) -> Run:
    """Return the newest run of the state that the workspace's `dvc.lock`, or that of a commit, has of a stage."""
    commit = "" if name == "workspace" else git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if not (commit or name == "workspace"):
        raise UserError(f"{name}: no such commit")
    state = _states(snapshot_of(commit) if commit else working_snapshot()).get(stage)
    matches = [run for run in runs if state and run.data.tags.get("state") == state]
    if not matches:
        raise UserError(f"{name}: stage {stage} has no run there; `dvc repro` or `gradtrail sync` makes it")
    return matches[0]


def _states(snapshot: Snapshot | None) -> dict[str, str]:
    """Return stage → state."""
    return {stage.name: stage.state for stage in consistent_stages(snapshot)} if snapshot else {}
