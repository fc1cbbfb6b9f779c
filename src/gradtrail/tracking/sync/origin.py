"""The commit and the experiment of a state that a lock or DVC's run-cache records."""

import hashlib
from typing import Any

from gradtrail.stages.common.files import folder_digest
from gradtrail.stages.common.params import parse_yaml
from gradtrail.stages.common.pipeline_file import is_code, values_of
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs, files_below, head_commit
from gradtrail.tracking.lineage.snapshots import disk_cached
from gradtrail.tracking.lineage.state import Identity


def origin_of(stage: Identity) -> dict[str, str]:
    """Return tags: commit, experiment and its baseline, and whether the state has other code or params than the commit.

    For a state that no commit records, that is the commit that is checked out if it has the same code and params.
    """
    tags = stage.snapshot.tags if stage.snapshot else {}
    commit = stage.snapshot.commit if stage.snapshot else ""
    if commit:
        return tags | {"git.dirty": str(not commit_has(stage, commit)).lower()}
    head = head_commit()
    return tags | ({"mlflow.source.git.commit": head, "git.dirty": "false"} if head and commit_has(stage, head) else {})


def commit_has(stage: Identity, commit: str) -> bool:
    """Whether a commit has the code and the params that a state, and all states before it, were made with."""
    entries = [stage.entry(name) for name in stage.lineage]
    code = {dep: md5 for entry in entries for dep, md5 in entry.deps.items() if is_code(dep)}
    files = {dep: files_below(commit, dep) if md5.endswith(".dir") else [dep] for dep, md5 in code.items()}
    params = {file for entry in entries for file in entry.params}
    contents = blobs(commit, params.union(*files.values()))
    if any(_digest(dep, files[dep], contents) != md5 for dep, md5 in code.items()):
        return False
    try:
        return all(
            values_of(_parsed(contents[file]), tuple(then), file) == then
            for entry in entries
            for file, then in entry.params.items()
        )
    except (UserError, KeyError, TypeError):  # the commit lacks the file, or it is no params file
        return False


def _parsed(content: bytes) -> dict[str, Any]:
    return disk_cached(f"params-{hashlib.sha256(content).hexdigest()}", lambda: parse_yaml(content, "params.yaml"))


def _digest(dep: str, files: list[str], contents: dict[str, bytes]) -> str:
    """Return the digest of a dep in a commit, as DVC computes it; empty if the commit lacks it."""
    if not all(file in contents for file in files):
        return ""
    if files == [dep]:
        return _md5(contents[dep])
    return folder_digest({file.removeprefix(f"{dep}/"): _md5(contents[file]) for file in files})


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
