"""The key of a state: the same wherever it is computed, one for each distinct state.

A state is the stage, its command, the params that it reads, the digests of its deps, and the states of the stages
upstream. All but the last are in `dvc.lock`, in the same form as here, so that the key can be computed from the
working folder and from a lock file alike.
"""

import functools
from collections.abc import Callable, Mapping

from gradtrail.stages.common.pipeline_file import Entry, StageSpec, sha256_of, upstream_stages


def state_key(stage: str, pipeline: Mapping[str, StageSpec], entry_of: Callable[[str], Entry]) -> str:
    """Return the key of a stage's state: sha256, as 64 hexadecimal digits.

    Args:
        stage: name of the stage.
        pipeline: all stages.
        entry_of: returns the entry of a stage, from the workspace or from a lock file.
    """

    @functools.cache
    def key(name: str) -> str:
        entry = entry_of(name)
        made_by = {stage: key(stage) for stage in upstream_stages(name, pipeline)}
        content = {"stage": name, "cmd": entry.cmd, "params": entry.params, "deps": entry.deps, "made_by": made_by}
        return sha256_of(content)

    return key(stage)


def entry_key(stage: str, entry: Entry) -> str:
    """Return a key of what determines a stage's outs, whatever the states of the stages before it."""
    return sha256_of({"stage": stage, "cmd": entry.cmd, "params": entry.params, "deps": entry.deps})
