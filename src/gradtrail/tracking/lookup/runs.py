"""Find runs in MLflow's store by name or id, by state, by DVC experiment, by commit, or by the content of a file."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mlflow.entities import Run

from gradtrail.stages.common.dvc_cache import listing
from gradtrail.stages.common.files import digest
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError, one_line, suggestion
from gradtrail.support.git import git
from gradtrail.support.paths import working_folder
from gradtrail.tracking.lineage.recorded import consistent_stages, find_experiments, snapshot_of, working_snapshot
from gradtrail.tracking.mlflow.links import PARENT
from gradtrail.tracking.mlflow.tags import outputs

WORKSPACE = "workspace"
_PREFIX = re.compile("[0-9a-f]{4,64}")  # of an id or a state


def find_run(name: str, runs: list[Run], stage: str | None = None) -> Run:
    """Return the one run that a name refers to.

    Args:
        name: `workspace`, `HEAD` or another commit of git, or a name for `look_up`.
        runs: All runs of the store, newest first.
        stage: Stage of the run if a commit or an experiment has several; None for the training.

    Raises:
        UserError: No run or more than one has this name; one line.
    """
    matches = list(_runs_of_commit(name, runs, stage or TRAIN)) or look_up(name, runs)
    if stage:
        matches = [run for run in matches if run.data.tags["stage"] == stage] or _relatives(matches, runs, stage)
    if len(matches) > 1 and len({run.data.tags["state"] for run in matches}) > 1:
        some = ", ".join(run.info.run_id[:8] for run in matches[:8])
        raise UserError(f"{one_line(name)[:100]}: {len(matches)} runs; give the id of one: {some}")
    if not matches:
        raise UserError(f"{one_line(name)[:100]}: no run of the stage {stage}")
    return matches[0]


def look_up(name: str, runs: Iterable[Run], place: Path = Path()) -> list[Run]:
    """Return the runs that a name refers to, newest first.

    Args:
        name: A run's id or name, a state, a prefix of an id or a state (at least four digits), the name of a DVC
            experiment, or the path of a file or folder anywhere, whose content is looked up among the outputs. The name
            of an experiment refers to its training.
        runs: All runs of the store, newest first.
        place: Folder that a path is relative to.

    Raises:
        UserError: No run has this name; one line.
    """
    runs = [run for run in runs if "state" in run.data.tags]
    states = _states_of_experiment(name)
    tests: list[Callable[[Run], bool]] = [
        lambda run: name in (run.info.run_id, run.data.tags.get("state")),
        lambda run: name == run.info.run_name,
        lambda run: run.data.tags["state"] in states and run.data.tags["stage"] == "train",
        lambda run: name == run.data.tags.get("dvc.exp_name") and run.data.tags["stage"] == "train",
        lambda run: run.data.tags["state"] in states or name == run.data.tags.get("dvc.exp_name"),
    ]
    if _PREFIX.fullmatch(name):
        tests.append(lambda run: any(key.startswith(name) for key in (run.info.run_id, run.data.tags.get("state", ""))))
    for test in tests:
        if matches := [run for run in runs if test(run)]:
            return matches
    path = place / name
    if path.exists():
        return writers(path, runs)
    names = {run.info.run_name for run in runs} | {run.data.tags.get("dvc.exp_name", "") for run in runs}
    raise UserError(
        f"{one_line(name)[:100]}: no run has this name, id, state or experiment, and there is no such file"
        f"{suggestion(name, names) or '; `gradtrail sync` backfills missing runs'}"
    )


def writers(path: Path, runs: Iterable[Run]) -> list[Run]:
    """Return the runs with an output that has the content of a file or folder.

    Several runs may have written the same bytes: those that wrote them to this path are preferred, and among those the
    one whose state is in `dvc.lock`.

    Raises:
        UserError: No run wrote these bytes.
    """
    md5 = digest(path)
    matches = {run.info.run_id: (run, outs) for run in runs if (outs := {*_outs_with(md5, run)})}
    if not matches:
        raise UserError(f"{path}: no run wrote these bytes (md5 {md5})")
    in_place = [
        run for run, outs in matches.values() if path.resolve() in {(working_folder() / out).resolve() for out in outs}
    ]
    working = working_snapshot()
    current = {stage.state for stage in consistent_stages(working)} if working else set()
    current_runs = [run for run in in_place if run.data.tags["state"] in current]
    return current_runs or in_place or [run for run, _ in matches.values()]


def _states_of_experiment(name: str) -> set[str]:
    """Return the states of the newest experiment of a name, even if their runs name another experiment."""
    commits = [one.commit for one in find_experiments() if one.name == name]
    snapshot = snapshot_of(commits[-1]) if commits else None
    return {stage.state for stage in consistent_stages(snapshot)} if snapshot else set()


def _outs_with(expected: str, run: Run) -> Iterator[str]:
    """Yield the paths of all outputs, and of all files in outputs, with this digest."""
    for out, md5_of_out in outputs(run.data.tags).items():
        if md5_of_out == expected:
            yield out
        elif md5_of_out.endswith(".dir"):
            yield from (f"{out}/{name}" for name, md5 in (listing(md5_of_out) or {}).items() if md5 == expected)


def _runs_of_commit(name: str, runs: list[Run], stage: str) -> Iterator[Run]:
    """Yield the newest run of the state that the workspace's `dvc.lock`, or that of a commit, has of a stage."""
    if name == WORKSPACE:
        snapshot = working_snapshot()
    elif name == "HEAD" or re.fullmatch(r"HEAD[~^\d]+|[0-9a-f]{40}", name):
        if not (commit := git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")):
            raise UserError(f"{name}: no such commit")
        snapshot = snapshot_of(commit)
    else:
        return
    states = {one.name: one.state for one in consistent_stages(snapshot)} if snapshot else {}
    if not (matches := [run for run in runs if run.data.tags.get("state") == states.get(stage, "")]):
        raise UserError(f"{name}: stage {stage} has no run there; `dvc repro` or `gradtrail sync` makes it")
    yield matches[0]


def _relatives(matches: list[Run], runs: list[Run], stage: str) -> list[Run]:
    """Return the runs of another stage that belong to the same trainings."""
    ids = {run.info.run_id for run in matches}
    return [run for run in runs if run.data.tags.get("stage") == stage and run.data.tags.get(PARENT) in ids]
