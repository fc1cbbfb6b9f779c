"""Find the completed runs of a comparison in MLflow, by what DVC itself compares.

A planned run counts as completed where DVC would find nothing to do for its params: each stage up to the evaluation has
a finished run with the same command, params, versions, code and data, as `dvc.lock` would have them. Runs of other code
or of other raw data are therefore never mixed in. What machine a run was on, and under what load, is not compared;
its times depend on it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow.entities import Run

from gradtrail.experiments.sweep.spec import STAGE, Comparison, PlannedRun, params_of
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.overrides import PARAMS
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import TRAIN, Entry, StageSpec, contains_path, values_of
from gradtrail.tracking.lineage.dvc_cache import digest_within
from gradtrail.tracking.lineage.keys import state_key
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.search import Find
from gradtrail.tracking.mlflow.stored_run import REBUILT
from gradtrail.tracking.mlflow.tags import outputs


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """The metrics of a planned run that is complete.

    Attributes:
        planned: the run of the comparison.
        accuracy: on the test split.
        loss: mean loss on the test split.
        seconds: time of the training loop; None where the run was rebuilt from its outs, which do not contain it.
        compile_seconds: compile time of the training stage; None likewise.
        dataset: name of the data set and the first digits of its digest.
        run_id: MLflow's id of the training's run.
    """

    planned: PlannedRun
    accuracy: float
    loss: float
    seconds: float | None
    compile_seconds: float | None
    dataset: str
    run_id: str


class RunFinder:
    """Finds completed runs.

    Args:
        find: finds runs by their tags.
    """

    def __init__(self, find: Find):
        self._find = find
        self._stage = Identity(STAGE)
        self._digests: dict[str, str] = {}

    def find(self, planned: Iterable[PlannedRun], comparison: Comparison) -> list[CompletedRun]:
        """Return the planned runs that are complete, in their order."""
        found = ((run, self._stage_runs(params_of(run, comparison, self._params))) for run in planned)
        return [_completed(run, runs[TRAIN], runs[STAGE]) for run, runs in found if runs]

    def _stage_runs(self, params: Mapping[str, Any]) -> dict[str, Run] | None:
        """Return the run of each stage with these params; None where a stage has none."""
        outs: dict[str, str] = {}
        runs: dict[str, Run] = {}
        for name in self._stage.lineage:
            entry = self._entry(self._stage.pipeline[name], params, outs)
            found = self._find({"state": state_key(name, entry)}, finished=True) if entry else []
            if not found:
                return None
            runs[name] = next((run for run in found if REBUILT not in run.data.tags), found[0])
            outs |= outputs(runs[name].data.tags)
        return runs

    def _entry(self, spec: StageSpec, params: Mapping[str, Any], outs: Mapping[str, str]) -> Entry | None:
        """Return what determines a stage's outs; None where the digest of a dep is unknown."""
        contents = {name: params if name == str(PARAMS) else read_yaml(Path(name)) for name in spec.params}
        values = {name: values_of(contents[name], keys, name) for name, keys in spec.params.items()}
        deps = {dep: self._dep(dep, outs) for dep in spec.deps}
        known = {dep: md5 for dep, md5 in deps.items() if md5 is not None}
        return Entry(cmd=spec.cmd, params=values, deps=known) if len(known) == len(deps) else None

    def _dep(self, dep: str, outs: Mapping[str, str]) -> str | None:
        """Return the digest of a dep: of an upstream stage's out, or else (code) of the file as it is now."""
        for out, md5 in outs.items():
            if contains_path(out, dep):
                return digest_within(out, md5, dep)
        if dep not in self._digests:
            self._digests[dep] = digest(Path(dep))
        return self._digests[dep]

    @cached_property
    def _params(self) -> dict[str, Any]:
        return read_yaml(PARAMS)


def _completed(planned: PlannedRun, train: Run, evaluation: Run) -> CompletedRun:
    tags = train.data.tags
    return CompletedRun(
        planned=planned,
        accuracy=evaluation.data.metrics["eval/accuracy"],
        loss=evaluation.data.metrics["eval/loss"],
        seconds=train.data.metrics.get("train/seconds"),
        compile_seconds=train.data.metrics.get("train/compile_total_seconds"),
        dataset=f"{tags['dataset']} {tags['dataset_digest'][:8]}",
        run_id=train.info.run_id,
    )
