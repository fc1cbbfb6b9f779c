"""The key of a state: the same wherever it is computed, one for each distinct state.

A state is the stage, its command, the params that it reads, and the digests of its deps, code and data. What made the
data is its lineage, and not part of the key: a change upstream that alters no byte leads to no other state. All of it
is in `dvc.lock`, so the key is the same if it is computed from a lock file or from the working folder.
"""

from gradtrail.stages.common.pipeline_file import Entry, sha256_of


def state_key(stage: str, entry: Entry) -> str:
    """Return the key of a stage's state: sha256, as 64 hexadecimal digits."""
    return sha256_of({"stage": stage, "cmd": entry.cmd, "params": entry.params, "deps": entry.deps})
