"""Of which commit and experiment a state is that was not just made, but found."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import is_code, values_of
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs, git
from gradtrail.tracking.lineage.snapshots import PARAMS, disk_cached
from gradtrail.tracking.lineage.state import Identity


def origin_of(stage: Identity) -> dict[str, str]:
    """Return tags: commit, experiment and its baseline, and whether the commit has other code or params than the state.

    Of a state that no commit has, the one that is checked out counts if it has the same code and params.
    """
    tags = stage.snapshot.tags if stage.snapshot else {}
    commit = stage.snapshot.commit if stage.snapshot else ""
    if commit:
        return tags | {"git.dirty": str(not commit_has(stage, commit)).lower()}
    head = git("rev-parse", "HEAD")
    return tags | ({"mlflow.source.git.commit": head, "git.dirty": "false"} if head and commit_has(stage, head) else {})


def commit_has(stage: Identity, commit: str) -> bool:
    """Whether a commit has the code and the params that a state, and all before it, was made with."""
    entries = [stage.entry(name) for name in stage.lineage]
    code = {dep: md5 for entry in entries for dep, md5 in entry.deps.items() if is_code(dep)}
    found = blobs(commit, {*code, *(file for entry in entries for file in entry.params)})
    if any(dep not in found or _md5(found[dep]) != md5 for dep, md5 in code.items()):
        return False
    try:
        return all(
            values_of(_parsed(found[file]), tuple(then), file) == then
            for entry in entries
            for file, then in entry.params.items()
        )
    except (UserError, KeyError, TypeError):  # no such file in the commit, or none of params
        return False


def _parsed(content: bytes) -> dict[str, Any]:
    def parse() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "params.yaml"
            path.write_bytes(content)
            return read_yaml(path)

    return disk_cached(f"{PARAMS}{hashlib.sha256(content).hexdigest()}", parse)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
