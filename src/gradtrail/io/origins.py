"""Of which commit and experiment a state is that was not just made, but found."""

import dataclasses
import tempfile
from pathlib import Path

from gradtrail.io.errors import UserError
from gradtrail.io.git import blobs, git
from gradtrail.io.identity import Identity
from gradtrail.io.states import live_entry


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
    specs = {name: stage.pipeline[name] for name in stage.lineage}
    code = {name: tuple(dep for dep in spec.deps if dep.endswith(".py")) for name, spec in specs.items()}
    wanted = {path for name, spec in specs.items() for path in (*code[name], *spec.params)}
    if any(Path(path).is_absolute() or ".." in Path(path).parts for path in wanted):
        return False
    with tempfile.TemporaryDirectory() as place:
        for path, content in blobs(commit, sorted(wanted)).items():
            target = Path(place) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        try:
            found = {n: live_entry(dataclasses.replace(spec, deps=code[n]), Path(place)) for n, spec in specs.items()}
        except (UserError, OSError):
            return False
    entries = {name: stage.entry(name) for name in specs}
    return all(
        found[name].params == entry.params and found[name].code_digest == entry.code_digest
        for name, entry in entries.items()
    )
