"""Entries of stages that have not run yet, as DVC would record them, for params that differ from `params.yaml`."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from gradtrail.stages.common.dvc_cache import digest_within
from gradtrail.stages.common.files import digest
from gradtrail.stages.common.params import PARAMS, read_yaml
from gradtrail.stages.common.pipeline_file import (
    Entry,
    StageSpec,
    contains_path,
    locked_entry,
    output_digests,
    read_locks,
    read_pipeline,
    values_of,
)


class PlannedStages:
    """The stages of the working folder's main pipeline; its files are read once."""

    def __init__(self) -> None:
        self._digests: dict[str, str | None] = {}

    @cached_property
    def pipeline(self) -> dict[str, StageSpec]:
        """The stages of `dvc.yaml`."""
        return read_pipeline()

    @cached_property
    def params(self) -> dict[str, Any]:
        """The content of `params.yaml`."""
        return read_yaml(PARAMS)

    def values(self, stage: str, params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the values that a stage reads, per params file, if `params.yaml` has this content."""
        files = self.pipeline[stage].params
        contents = {name: params if name == str(PARAMS) else read_yaml(Path(name)) for name in files}
        return {name: values_of(contents[name], keys, name) for name, keys in files.items()}

    def entry(self, stage: str, params: Mapping[str, Any], outs: Mapping[str, str]) -> Entry | None:
        """Return what determines a stage's outputs; None if the digest of a dep is unknown.

        Args:
            stage: The stage.
            params: Content of `params.yaml`.
            outs: Digests of the outputs of the stages before it, path → digest.
        """
        spec, deps = self.pipeline[stage], dict[str, str]()
        for dep in spec.deps:
            md5 = self._digest(dep, outs)
            if md5 is None:
                return None
            deps[dep] = md5
        return Entry(cmd=spec.cmd, params=self.values(stage, params), deps=deps)

    def locked_outs(self, stage: str, entry: Entry | None) -> dict[str, str] | None:
        """Return the outputs of a stage, path → digest, if `dvc.lock` records this entry; otherwise None."""
        section = self._lock.get(stage)
        return output_digests(section) if section and locked_entry(section) == entry else None

    @cached_property
    def _lock(self) -> dict[str, Any]:
        return read_locks(Path())

    def _digest(self, dep: str, outs: Mapping[str, str]) -> str | None:
        """Return the digest of a dep: that of an output before it, or of the file (such as code) as it is now."""
        for out, md5 in outs.items():
            if contains_path(out, dep):
                return digest_within(out, md5, dep)
        if dep not in self._digests:
            self._digests[dep] = digest(Path(dep)) if Path(dep).exists() else None
        return self._digests[dep]
