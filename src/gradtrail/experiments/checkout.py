"""`gradtrail checkout`: brings back the code, the params and the outputs of a run.

A commit that records the run is checked out. If there is none, one is made, on no branch, of the commit that the run
began with, its `git.diff`, its metrics files and a `dvc.lock` of its states. So no edit is left in the working folder,
and git alone leads back. Everything is checked before the first file changes.
"""

import dataclasses
import functools
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run
from ruamel.yaml import YAML

from gradtrail.experiments.show import read_lineage
from gradtrail.stages.common.dvc_cache import cached_files, has_remote, is_here, restore
from gradtrail.stages.common.files import digest
from gradtrail.stages.common.pipeline_file import FILES, Entry, is_code, locked_entry, output_digests, parse_pipeline
from gradtrail.stages.common.yaml_file import parse_yaml
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs, git, git_bytes, head_commit, strict_git
from gradtrail.tracking.artifacts import download
from gradtrail.tracking.dvc_history import difference, recorded_states, snapshot_of
from gradtrail.tracking.find_run import look_up
from gradtrail.tracking.run_cache import Section, fits
from gradtrail.tracking.runs import RunIndex, find_equivalent_run
from gradtrail.tracking.state import RecordedState, Snapshot, state_key
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import outputs
from gradtrail.tracking.working_diff import NOT_IN_GIT

_READ = ("src/", "pipeline/")  # code, and data that git has
_METRICS = "results/metrics/"  # git has these outputs, DVC's cache all others
_IDENTITY = {f"GIT_{role}_{part}": "gradtrail" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where the code and the params of a run are, and what it is recorded as."""

    commit: str
    tree: str  # the commit, or the id of its tree with the run's changes
    stages: list[str]  # the run's stage, last, and those before it
    sections: dict[str, Section]  # of `dvc.lock`, for the stages whose outputs are known


def checkout(word: str, place: Path, *, allow_missing: bool) -> int:
    """Bring back what a run of `look_up` read and wrote; return the exit status, DVC's if it fails.

    Raises:
        UserError: no run or several have the name, something of the run is missing, or a file here would be lost.
            Nothing has changed then. With `allow_missing`, outputs may be missing.
    """
    head = _require_committed()
    client = open_store()
    index = RunIndex(client)
    matches = look_up(word, index.runs(), place)
    if len(matches) > 1:
        raise UserError(f"{word}: {len(matches)} runs; `gradtrail show {word}` lists them")
    (run,) = matches
    source = _recorded(run, index) or _with_diff(run, index, client)
    files, outs, missing = _plan(source)
    remedy = f"{'`dvc pull` fetches or ' if has_remote() else ''}`dvc repro` computes them"
    if missing and not allow_missing:
        names = ", ".join(f"{out} ({md5})" for out, md5 in missing.items())
        rest = f"`gradtrail checkout {word} --allow-missing` brings back the rest, then {remedy}"
        raise UserError(f"not in DVC's cache: {names}; {rest}")
    commit = _commit(run, source.commit, _tree(source.tree, files=files))
    _require_saved(commit, outs)

    branch = git("symbolic-ref", "--quiet", "--short", "HEAD")
    if commit != head:
        strict_git("-c", f"core.hooksPath={os.devnull}", "checkout", "--detach", commit)  # DVC has a hook that may fail
    made = f", made of {source.commit[:12]} for this run; `git switch -c NAME` gives it a branch"
    print(f"code and params: commit {commit[:12]}{made if commit != source.commit else ''}", flush=True)
    if outs:
        command = [sys.executable, "-m", "dvc", "checkout", "--force", *outs]
        if status := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            return status
    print(f"outs: {len(outs)}, with those of {', '.join(source.sections) or 'no stage of the run'}")
    if absent := [*missing, *(f"those of {name}" for name in source.stages if name not in source.sections)]:
        print(f"missing: {', '.join(absent)}; {remedy}")
    if commit != head:
        print(f"to go back: git {f'switch {branch}' if branch else f'checkout {head[:12]}'} && dvc checkout dvc.yaml")
    return 0


def _require_committed() -> str:
    """Return the commit of HEAD; raise UserError if a tracked file differs from it."""
    if not (head := head_commit()):
        raise UserError(f"{Path.cwd()}: git has no commit here")
    if edited := git("diff", "--name-only", head).splitlines():
        raise UserError(f"{edited[0]}: has uncommitted changes; commit them, or put them aside with `git stash`")
    return head


def _recorded(run: Run, index: RunIndex) -> _Source | None:
    """Return the commit or experiment that records the result of a run and has the code and params that made it.

    One of the run's very state comes first, then one whose other code wrote the same; of either HEAD, then the newest.
    """
    name, tags = run.data.tags["stage"], run.data.tags
    snapshots = [snapshot_of(head_commit()), *reversed(recorded_states().snapshots)]
    stages = [RecordedState(name, snapshot=one) for one in snapshots if one and one.commit and name in one.pipeline]
    sound = [stage for stage in stages if stage.is_sound]
    same = [one for one in sound if one.state == tags["state"] and outputs(tags) in ({}, one.out_digests())]
    alike = (one for one in sound if find_equivalent_run(index, one) is run)
    for stage in (*same, *alike):
        if stage.snapshot and not any(_difference(stage.commit, stage.entry(name)) for name in stage.lineage):
            sections = {name: stage.snapshot.lock[name] for name in stage.lineage}
            return _Source(commit=stage.commit, tree=stage.commit, stages=stage.lineage, sections=sections)
    return None


def _with_diff(run: Run, index: RunIndex, client: MlflowClient) -> _Source:
    """Return the commit that a run began with, and its changes; UserError if they lack what the run's stage read."""
    tags, run_id = run.data.tags, run.info.run_id
    commit = tags.get("mlflow.source.git.commit", "")
    if not git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        why = f"commit {commit} is not in this repository; `git fetch` may bring it" if commit else "it has no commit"
        raise UserError(f"{run_id}: {why}")
    with tempfile.TemporaryDirectory() as folder:
        file = download(client, run_id, "git.diff", Path(folder))
        diff = file.read_bytes() if file else b""
    text = diff.decode(errors="replace")
    if tags.get("git.dirty") == "true" and not diff:
        raise UserError(f"{run_id}: ran with changes of commit {commit[:12]}, and its git.diff is missing")
    lineage = read_lineage(client, run_id)
    entries = {name: Entry(cmd=one["cmd"], params=one["params"], deps=one["deps"]) for name, one in lineage.items()}
    tree = _tree(commit, diff)
    if mismatch := _difference(tree, entries[tags["stage"]]):
        files = [line for line in text.splitlines() if line.startswith(NOT_IN_GIT)]
        files += [f"untracked: {name}" for name in _untracked()]
        raise UserError("; ".join([f"{run_id}: commit {commit[:12]} has not what the run read: {mismatch}", *files]))
    sections = _sections(run, entries, index, snapshot_of(commit))
    return _Source(commit=commit, tree=tree, stages=[*entries], sections=sections)


def _untracked() -> list[str]:
    """Return the untracked files that stages may read: a checkout leaves them where they are."""
    listed = git_bytes("ls-files", "--others", "--exclude-standard", "-z", "--", *_READ).split(b"\0")
    return [os.fsdecode(name) for name in listed if name]


def _difference(tree: str, entry: Entry) -> str:
    """Return what a tree has otherwise than the code, params and data of git that a stage read; empty if nothing."""
    deps = {dep: md5 for dep, md5 in entry.deps.items() if is_code(dep) or dep.startswith(_READ)}
    return difference(tree, dataclasses.replace(entry, deps=deps), _untracked())


def _sections(run: Run, entries: dict[str, Entry], index: RunIndex, snapshot: Snapshot | None) -> dict[str, Section]:
    """Return a section of `dvc.lock` for each of a run's stages whose outputs a snapshot or a run has."""
    lock = snapshot.lock if snapshot else {}
    sections: dict[str, Section] = {}
    for name, entry in reversed(entries.items()):
        is_own = name == run.data.tags["stage"]
        runs = [run] if is_own else index({"state": state_key(name, entry)}, finished=True)
        made = [_section(entry, outs) for one in runs if (outs := outputs(one.data.tags))]
        if name in lock and locked_entry(lock[name]) == entry and not (is_own and made):
            made.insert(0, lock[name])
        if fitting := next((one for one in made if fits(one, sections.values())), None):
            sections[name] = fitting
    return dict(reversed(sections.items()))


def _section(entry: Entry, outs: Mapping[str, str]) -> Section:
    def items(files: Mapping[str, str]) -> list[dict[str, str]]:
        return [{"path": path, "hash": "md5", "md5": md5} for path, md5 in sorted(files.items())]

    return {"cmd": entry.cmd, "deps": items(entry.deps), "params": entry.params, "outs": items(outs)}


def _plan(source: _Source) -> tuple[dict[str, bytes], dict[str, str], dict[str, str]]:
    """Return what makes of a source one that records the run's sections and has their metrics.

    Returns:
        Path → content that the commit shall have; path → digest of what DVC checks out, of the other stages only what
        is here; and path → digest of the outputs of the run's stages that nothing here has.
    """
    files, outs, missing = dict[str, bytes](), dict[str, str](), dict[str, str]()
    contents = blobs(source.tree, FILES)
    for file, lock_file in zip(FILES[::2], FILES[1::2], strict=True):
        stages = parse_pipeline(parse_yaml(contents[file], file), file) if file in contents else {}
        needed = {name: source.sections[name] for name in stages if name in source.sections}
        if file != FILES[0] and not needed:
            continue  # DVC does not see an optional pipeline that never ran
        lock = parse_yaml(contents.get(lock_file, b"schema: '2.0'"), lock_file)
        locked: dict[str, Section] = lock.get("stages", {}) | needed
        files |= {lock_file: _as_yaml(lock | {"stages": locked})} if locked != lock.get("stages") else {}
        files |= {str(Path(file).with_name(".dvcignore")): b"!/dvc.yaml\n"} if file != FILES[0] else {}
        digests = [(out, md5, name) for name in stages for out, md5 in output_digests(locked.get(name, {})).items()]
        with tempfile.TemporaryDirectory() as folder:
            for out, md5, name in digests:
                if not out.startswith(_METRICS) and is_here(out, md5):
                    outs[out] = md5
                elif name in needed and out.startswith(_METRICS) and restore(out, md5, Path(folder), source.commit):
                    files[out] = Path(folder, out).read_bytes()
                elif name in needed:
                    missing[out] = md5
    return files, outs, missing


def _as_yaml(content: Mapping[str, Any]) -> bytes:
    yaml, stream = YAML(), io.BytesIO()
    yaml.default_flow_style = False
    yaml.dump(content, stream)
    return stream.getvalue()


def _tree(source: str, diff: bytes = b"", files: Mapping[str, bytes] | None = None) -> str:
    """Store the tree of a commit or tree with a diff and with files of other content; return its id."""
    with tempfile.TemporaryDirectory() as folder:
        with_index = functools.partial(git_bytes, env={"GIT_INDEX_FILE": f"{folder}/index"})
        with_index("read-tree", source)
        if b"diff --git " in diff:
            with_index("apply", "--cached", "--whitespace=nowarn", stdin=diff)
        prefix = git("rev-parse", "--show-prefix")
        for path, content in (files or {}).items():
            blob = git_bytes("hash-object", "-w", "--stdin", stdin=content).decode().strip()
            with_index("update-index", "--add", "--cacheinfo", f"100644,{blob},{prefix}{path}")
        return with_index("write-tree").decode().strip()


def _commit(run: Run, base: str, tree: str) -> str:
    """Return the commit with a tree: the base, or else one on top of it, which is the same each time."""
    if tree == git("rev-parse", f"{base}^{{tree}}"):
        return base
    date = f"{run.info.start_time // 1000} +0000"
    env = _IDENTITY | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    message = f"{run.info.run_name}\n\nMade by `gradtrail checkout` of run {run.info.run_id}\n"
    return git_bytes("commit-tree", tree, "-p", base, stdin=message.encode(), env=env).decode().strip()


def _require_saved(commit: str, outs: Mapping[str, str]) -> None:
    """Raise UserError if checking out a commit and outputs would replace a file of which there is no copy."""
    added = git_bytes("diff", "--name-only", "-z", "--no-renames", "--diff-filter=A", "--relative", "HEAD", commit)
    for name in map(os.fsdecode, added.split(b"\0")[:-1]):
        if os.path.lexists(name):
            raise UserError(f"{name}: not in git, and the run has a file in its place; commit it or move it away")
    for out, md5 in outs.items():
        if Path(out).exists() and (current := digest(Path(out))) != md5 and cached_files(current) is None:
            raise UserError(f"{out}: not in DVC's cache, and the run has another; move it away")
