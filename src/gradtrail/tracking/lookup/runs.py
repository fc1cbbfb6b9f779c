"""Find runs in MLflow's store by name or id, by state, by DVC experiment, by commit, or by the content of a file."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mlflow.entities import Run

from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.dvc_cache import listing
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError, one_line, suggestion
from gradtrail.support.git import git
from gradtrail.support.paths import working_folder
from gradtrail.tracking.lineage.recorded import consistent_stages
from gradtrail.tracking.lineage.snapshots import find_experiments, snapshot_of, working_snapshot
from gradtrail.tracking.mlflow.links import PARENT
from gradtrail.tracking.mlflow.tags import outputs

WORKSPACE = "workspace"
_PREFIX = re.compile("[0-9a-f]{4,64}")  # of an id or a state


def find_run(what: str, runs: list[Run], stage: str | None = None) -> Run:
    """Return the one run that a word refers to.

    Args:
        what: `workspace`, `HEAD` or another commit of git, or what `look_up` takes.
        runs: all runs of the store, the newest first.
        stage: of the run to take where a commit or an experiment has several; None for the training.

    Raises:
        UserError: there is none, or more than one; one line.
    """
    found = list(_of_commit(what, runs, stage or TRAIN)) or look_up(what, runs)
    if stage:
        found = [run for run in found if run.data.tags["stage"] == stage] or _relatives(found, runs, stage)
    if len(found) > 1 and len({run.data.tags["state"] for run in found}) > 1:
        some = ", ".join(run.info.run_id[:8] for run in found[:8])
        raise UserError(f"{one_line(what)[:100]}: {len(found)} runs; give the id of one: {some}")
    if not found:
        raise UserError(f"{one_line(what)[:100]}: no run of the stage {stage}")
    return found[0]


def look_up(what: str, runs: Iterable[Run], place: Path = Path()) -> list[Run]:
    """Return the runs that `what` refers to, the newest first.

    Args:
        what: a run's id or name, a state, a prefix of an id or a state (at least four digits), the name of a DVC
            experiment, or the path of a file or folder anywhere: its content is looked up among the outs. The name of
            an experiment refers to its training.
        runs: all runs of the store, the newest first.
        place: the folder that a path is relative to.

    Raises:
        UserError: no run is found; one line.
    """
    runs = [run for run in runs if "state" in run.data.tags]
    states = _states_of_experiment(what)
    tests: list[Callable[[Run], bool]] = [
        lambda run: what in (run.info.run_id, run.data.tags.get("state")),
        lambda run: what == run.info.run_name,
        lambda run: run.data.tags["state"] in states and run.data.tags["stage"] == "train",
        lambda run: what == run.data.tags.get("dvc.exp_name") and run.data.tags["stage"] == "train",
        lambda run: run.data.tags["state"] in states or what == run.data.tags.get("dvc.exp_name"),
    ]
    if _PREFIX.fullmatch(what):
        tests.append(lambda run: any(key.startswith(what) for key in (run.info.run_id, run.data.tags.get("state", ""))))
    for test in tests:
        if found := [run for run in runs if test(run)]:
            return found
    path = place / what
    if path.exists():
        return writers(path, runs)
    names = {str(name) for run in runs for name in (run.info.run_name, run.data.tags.get("dvc.exp_name", ""))}
    raise UserError(
        f"{one_line(what)[:100]}: no run has this name, id, state or experiment, and there is no such file"
        f"{suggestion(what, names) or '; `gradtrail sync` backfills missing runs'}"
    )


def writers(path: Path, runs: Iterable[Run]) -> list[Run]:
    """Return the runs with an out that has the content of a file or folder.

    Several runs may have written the same bytes: those that wrote them to this path are preferred, and among those the
    one whose state is in `dvc.lock`.

    Raises:
        UserError: no run wrote these bytes.
    """
    wanted = digest(path)
    found = {run.info.run_id: (run, outs) for run in runs if (outs := {*_outs_with(wanted, run)})}
    if not found:
        raise UserError(f"{path}: no run wrote these bytes (md5 {wanted})")
    here = [
        run for run, outs in found.values() if path.resolve() in {(working_folder() / out).resolve() for out in outs}
    ]
    working = working_snapshot()
    current = {stage.state for stage in consistent_stages(working)} if working else set()
    of_lock = [run for run in here if run.data.tags["state"] in current]
    return of_lock or here or [run for run, _ in found.values()]


def _states_of_experiment(name: str) -> set[str]:
    """Return the states of the newest experiment of a name, even if their runs name another experiment."""
    commits = [one.commit for one in find_experiments() if one.name == name]
    snapshot = snapshot_of(commits[-1]) if commits else None
    return {stage.state for stage in consistent_stages(snapshot)} if snapshot else set()


def _outs_with(wanted: str, run: Run) -> Iterator[str]:
    """Yield the paths of all outs, and of all files in outs, with this digest."""
    for out, found in outputs(run.data.tags).items():
        if found == wanted:
            yield out
        elif found.endswith(".dir"):
            yield from (f"{out}/{name}" for name, md5 in (listing(found) or {}).items() if md5 == wanted)


def _of_commit(name: str, runs: list[Run], stage: str) -> Iterator[Run]:
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
    if not (found := [run for run in runs if run.data.tags.get("state") == states.get(stage, "")]):
        raise UserError(f"{name}: stage {stage} has no run there; `dvc repro` or `gradtrail sync` makes it")
    yield found[0]


def _relatives(found: list[Run], runs: list[Run], stage: str) -> list[Run]:
    """Return the runs of another stage that belong to the same trainings."""
    ids = {run.info.run_id for run in found}
    return [run for run in runs if run.data.tags.get("stage") == stage and run.data.tags.get(PARENT) in ids]
