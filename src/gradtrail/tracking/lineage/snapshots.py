"""Pipelines with their locks, wherever there are some: in the working folder, git's history, and DVC's experiments.

What DVC's run-cache remembers of stages that ran, as snapshots: also of what no commit and no experiment has.

An entry is a stage's section of `dvc.lock`, without its name and without what came before it. The name follows from the
command; what came before is found by the digests of what was read. Where several entries wrote the same bytes the
newest is taken; so an entry counts only where nothing better knows of it.

Which states there are: those that commits, experiments and the working folder record, and those that only ran.

Sync gives each of them its row; `gradtrail gc` removes the rows of all others.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import (
    CHILDREN,
    StageSpec,
    entry_key,
    has_shape,
    holds,
    locked_entry,
    makers,
    read_lock,
    read_pipeline,
)
from gradtrail.support.errors import UserError
from gradtrail.support.git import blob_ids, git, git_bytes
from gradtrail.support.paths import private_folder, working_folder
from gradtrail.tracking.lineage.dvc_cache import cache_folder, digest_within, is_here
from gradtrail.tracking.lineage.state import Identity

_EXPERIMENT = re.compile(r"refs/exps/([0-9a-f]{2})/([0-9a-f]{38,62})/(.+)")  # others there are DVC's own
PARAMS = "params-"  # begins the key of a remembered params file: there are few of them
_FORM = "1"  # of what is remembered


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of DVC's experiments.

    Attributes:
        name: what DVC calls it.
        baseline: the commit that it started from.
        commit: its own.
    """

    name: str
    baseline: str
    commit: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A `dvc.yaml` and a `dvc.lock` that belong together.

    Attributes:
        pipeline: the stages.
        lock: what the lock says of each, as it stands there.
        commit: the first one that has them; empty where none has.
        experiment: DVC's, if it is one.
        key: that it is remembered by; empty where it is not.
    """

    pipeline: dict[str, StageSpec]
    lock: dict[str, Any]
    commit: str = ""
    experiment: Experiment | None = None
    key: str = ""

    @property
    def tags(self) -> dict[str, str]:
        """Where a row that is made of it comes from, as far as that is known."""
        tags = {"mlflow.source.git.commit": self.commit} if self.commit else {}
        if self.experiment:
            tags |= {"dvc.exp_name": self.experiment.name, "dvc.exp_baseline": self.experiment.baseline}
        return tags


def find_experiments() -> list[Experiment]:
    """Return DVC's experiments, the oldest first."""
    lines = git("for-each-ref", "--sort=committerdate", "--format=%(objectname) %(refname)", "refs/exps").splitlines()
    found = (line.split(" ", 1) for line in lines)
    named = ((commit, match) for commit, ref in found if (match := _EXPERIMENT.fullmatch(ref)))
    return [Experiment(name=match[3], baseline=match[1] + match[2], commit=commit) for commit, match in named]


def working_snapshot() -> Snapshot | None:
    """Return the working folder's; None without a lock.

    Raises:
        UserError: one of the files is none.
    """
    pipeline, lock = working_folder() / "dvc.yaml", working_folder() / "dvc.lock"
    if not lock.is_file():
        return None
    return _parsed(_blob_id(pipeline), _blob_id(lock), lambda: _parse(pipeline, lock))


def snapshot_of(commit: str) -> Snapshot | None:
    """Return a commit's; None where it lacks one of the files, or they are none."""
    (pipeline,), (lock,) = blob_ids([commit], "dvc.yaml"), blob_ids([commit], "dvc.lock")
    return _of_commit(commit, pipeline, lock) if pipeline and lock else None


def committed_snapshots() -> tuple[list[Snapshot], int]:
    """Return those of commits and experiments, each once, the oldest first; and how many are not to be read."""
    history = git("rev-list", "--reverse", "--full-history", "--exclude=refs/exps/*", "--all", "--", "dvc.lock")
    experiments = {one.commit: one for one in find_experiments()}
    commits = list(dict.fromkeys([*history.splitlines(), *experiments]))
    found: dict[tuple[str, str], Snapshot | None] = {}
    for commit, *ids in zip(commits, blob_ids(commits, "dvc.yaml"), blob_ids(commits, "dvc.lock"), strict=True):
        pair = (ids[0], ids[1])
        if not all(pair):
            continue
        if pair not in found:
            found[pair] = _of_commit(commit, *pair)
        if (one := found[pair]) and not one.experiment:
            found[pair] = dataclasses.replace(one, experiment=experiments.get(commit))
    readable = [one for one in found.values() if one]
    return readable, len(found) - len(readable)


def remembered(key: str, make: Callable[[], Any]) -> Any:
    """Return what `make` makes of a content with this key: from the last time, as reading YAML is slow."""
    path = _parsed_folder() / f"{key}-{_FORM}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    made = make()
    with atomic_file(path) as beside:
        beside.write_text(json.dumps(made))
    return made


def needless(keys: Iterable[str]) -> list[Path]:
    """Return the files of pipelines with locks, and of run-cache entries, remembered by other keys than these."""
    needed = {f"{key}-{_FORM}.json" for key in keys}
    others = (path for path in _parsed_folder().glob("*.json") if path.name not in needed)
    return sorted(path for path in others if not path.name.startswith(PARAMS))


def _parsed_folder() -> Path:
    return private_folder() / "parsed"


def _of_commit(commit: str, pipeline: str, lock: str) -> Snapshot | None:
    def parse() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / "dvc.yaml", Path(folder) / "dvc.lock"]
            for path, blob in zip(paths, (pipeline, lock), strict=True):
                path.write_bytes(git_bytes("cat-file", "blob", blob))
            return _parse(*paths)

    try:
        return dataclasses.replace(_parsed(pipeline, lock, parse), commit=commit)
    except (UserError, TypeError):  # of another project, or half merged
        return None


def _parsed(pipeline: str, lock: str, parse: Callable[[], dict[str, Any]]) -> Snapshot:
    """Return the snapshot of two contents with these ids."""
    content = remembered(key := f"{pipeline}-{lock}", parse)
    specs = {name: _spec(**spec) for name, spec in content["pipeline"].items()}
    return Snapshot(pipeline=specs, lock=content["lock"], key=key)


def _parse(pipeline: Path, lock: Path) -> dict[str, Any]:
    specs = {name: dataclasses.asdict(spec) for name, spec in read_pipeline(pipeline).items()}
    return {"pipeline": specs, "lock": read_lock(lock)}


def _spec(*, cmd: str, deps: list[str], params: Mapping[str, list[str]], outs: list[str]) -> StageSpec:
    keys = {name: tuple(found) for name, found in params.items()}
    return StageSpec(cmd=cmd, deps=tuple(deps), params=keys, outs=tuple(outs))


def _blob_id(path: Path) -> str:
    """Return the id that git has for a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


Section = dict[str, Any]
Pipeline = Mapping[str, StageSpec]


def entry_files() -> list[Path]:
    """Return the files of the run-cache, the oldest first."""
    files = [path for path in (cache_folder() / "runs").glob("??/*/*") if len(path.name) == 64]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def run_cache_snapshots(pipelines: Iterable[Pipeline], is_known: Callable[[str], bool]) -> list[Snapshot]:
    """Return a snapshot for each entry whose lineage the run-cache has, the oldest first.

    Args:
        pipelines: that the entries may be of; of several that an entry fits, the first counts.
        is_known: whether an entry, given by its key, needs no snapshot.
    """
    sections = [section for path in entry_files() if (section := _read(path))]
    found: dict[str, Snapshot] = {}
    for pipeline in pipelines:
        fitting = [(name, section) for section in sections if (name := _stage_of(section, pipeline))]
        for name, section in fitting:
            key = entry_key(name, locked_entry(section))
            if key in found or is_known(key):
                continue
            if lock := _lineage(name, section, fitting, pipeline):
                found[key] = Snapshot(pipeline=dict(pipeline), lock=lock)
    return list(found.values())


def _read(path: Path) -> Section | None:
    try:
        section = remembered(path.name, lambda: read_yaml(path))
        return section if locked_entry(section) and _outs(section) else None
    except (UserError, KeyError, TypeError):  # not ours to judge; DVC removes what it cannot read
        return None


def _stage_of(section: Section, pipeline: Pipeline) -> str | None:
    """Return the stage that an entry is of."""
    fitting = (name for name, spec in pipeline.items() if spec.cmd == section["cmd"] and has_shape(section, spec))
    return next(fitting, None)


def _lineage(name: str, section: Section, known: list[tuple[str, Section]], pipeline: Pipeline) -> dict[str, Section]:
    """Return a lock of a stage and all before it, each settled before its makers; empty where one is missing."""
    lock = {name: section}
    for stage in reversed(list(pipeline)):
        if stage in lock or not any(stage in makers(user, pipeline) for user in lock):
            continue
        wanted = {dep: read for one in lock.values() for dep, read in locked_entry(one).data.items()}
        fitting = (one for made, one in reversed(known) if made == stage and _fits(one, wanted))
        if (newest := next(fitting, None)) is None:
            return {}
        lock[stage] = newest
    if name in CHILDREN and "train" not in lock:  # it belongs to a training without reading what that wrote
        if not (trainings := [one for made, one in known if made == "train" and _is_of_training(section, one)]):
            return {}
        lock["train"] = trainings[-1]
    return {stage: lock[stage] for stage in pipeline if stage in lock}


def _is_of_training(section: Section, training: Section) -> bool:
    """Whether a training has the params, and read the data, that an entry has in common with it."""
    params, of_training = (locked_entry(one).params.get("params.yaml", {}) for one in (section, training))
    return params.get("train") == of_training.get("train") and _reads_alike(training, locked_entry(section).data)


def _fits(section: Section, wanted: Mapping[str, str]) -> bool:
    """Whether an entry wrote, of all that was read, the part that its outs hold, and read no other data itself."""
    return _reads_alike(section, wanted) and all(
        digest_within(out, md5, dep) == found
        for dep, found in wanted.items()
        for out, md5 in _outs(section).items()
        if holds(out, dep)
    )


def _reads_alike(section: Section, wanted: Mapping[str, str]) -> bool:
    return all(wanted.get(dep, md5) == md5 for dep, md5 in locked_entry(section).data.items())


def _outs(section: Section) -> dict[str, str]:
    return {out["path"]: out["md5"] for out in section["outs"]}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What commits, experiments and the working folder have.

    Attributes:
        snapshots: the oldest first, the working folder's last.
        num_unreadable: commits whose pipeline or lock is none.
    """

    snapshots: list[Snapshot]
    num_unreadable: int

    def only_ran(self, is_known: Callable[[str], bool]) -> list[Snapshot]:
        """Return what only the run-cache has, the oldest first, as far as DVC's cache has the files.

        Args:
            is_known: whether an entry, given by its key, needs no snapshot.
        """
        pipelines = [snapshot.pipeline for snapshot in reversed(self.snapshots)]
        return [snapshot for snapshot in run_cache_snapshots(pipelines, is_known) if has_files(last_stage(snapshot))]


def recorded_snapshots() -> Recorded:
    """Return all that is recorded.

    Raises:
        UserError: the working folder's pipeline or lock is none.
    """
    committed, num_unreadable = committed_snapshots()
    working = working_snapshot()
    return Recorded(snapshots=[*committed, *([working] if working else [])], num_unreadable=num_unreadable)


def sound_stages(snapshot: Snapshot) -> Iterator[Identity]:
    """Yield the stages of a snapshot whose states can be told, and whose training is one, in the pipeline's order."""
    stages = (Identity(name, from_lock=True, snapshot=snapshot) for name in snapshot.pipeline)
    sound = [stage for stage in stages if stage.is_sound]
    has_training = any(stage.name == "train" for stage in sound)
    yield from (stage for stage in sound if has_training or stage.name not in CHILDREN)


def last_stage(snapshot: Snapshot) -> Identity:
    """Return the last stage that a snapshot's lock has: of one from the run-cache, the one that it is about."""
    return Identity(list(snapshot.lock)[-1], from_lock=True, snapshot=snapshot)


def entry_of(stage: Identity) -> str:
    """Return the key of a stage's entry."""
    return entry_key(stage.name, stage.entry(stage.name))


def has_files(stage: Identity, *, but_metrics: bool = False) -> bool:
    """Whether DVC's cache, or the working folder, has all outs of a stage; if asked, but for its metrics file."""
    passed_over = f"metrics/{stage.name}.json" if but_metrics else None
    return all(is_here(out, md5) for out, md5 in stage.out_digests().items() if out != passed_over)
