"""Find the completed runs of a comparison in MLflow, by what DVC itself compares.

A planned run counts as completed where DVC would find nothing to do for its params: each stage up to the evaluation has
a finished run with the same command, params, versions, code and data, as `dvc.lock` would have them. Runs of other code
or of other raw data are therefore never mixed in. Runs on any kind of machine count; their times are another matter.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow.entities import Run

from gradtrail.experiments.sweep.members import ReadTable, seeds_trained, varies_all
from gradtrail.experiments.sweep.spec import STAGE, Comparison, PlannedRun, Training, params_of
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.dvc_cache import digest_within
from gradtrail.stages.common.overrides import PARAMS
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import (
    TRAIN,
    Entry,
    StageSpec,
    contains_path,
    locked_entry,
    read_locks,
    values_of,
)
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
        seconds: time of the training loop, of a member the mean over all; None where the run was rebuilt from its outs,
            which do not contain it.
        compile_seconds: compile time of the training stage; None likewise.
        began: when the training's run began, in seconds since 1970.
        ended: when it ended.
        machine: kind of machine that trained; None where it is not known.
        dataset: name of the data set and the first digits of its digest.
        run_id: MLflow's id of the training's run.
        accuracy_corrected: on the test split with corrected labels; None where none were.
    """

    planned: PlannedRun
    accuracy: float
    loss: float
    seconds: float | None
    compile_seconds: float | None
    began: float
    ended: float
    machine: str | None
    dataset: str
    run_id: str
    accuracy_corrected: float | None = None


class RunFinder:
    """Finds completed runs.

    Args:
        find: finds runs by their tags.
        read_table: reads the table of members of an evaluation's run.
    """

    def __init__(self, find: Find, read_table: ReadTable):
        self._find = find
        self._read_table = read_table
        self._stage = Identity(STAGE)
        self._digests: dict[str, str] = {}

    def find(self, planned: Iterable[PlannedRun], comparison: Comparison) -> list[CompletedRun]:
        """Return the planned runs that are complete, in their order; of those trained by themselves, the newest."""
        planned = list(planned)
        trainings = [] if comparison.timed else self._find({"stage": TRAIN}, finished=True)  # whose times are shared
        several = {seeds for run in trainings if varies_all(self._params) and (seeds := seeds_trained(run))}
        trained = [range(run.seed, run.seed + 1) for run in planned] + sorted(
            several, key=lambda seeds: (len(seeds), seeds.start)
        )
        found: dict[PlannedRun, CompletedRun] = {}
        for label in comparison.variants:
            for seeds in dict.fromkeys(trained):
                wanted = [run for run in planned if run.label == label and run.seed in seeds and run not in found]
                if wanted:
                    found |= self._completed(Training(label, seeds), wanted, comparison)
        return [found[run] for run in planned if run in found]

    def _completed(
        self, training: Training, wanted: Sequence[PlannedRun], comparison: Comparison
    ) -> dict[PlannedRun, CompletedRun]:
        """Return those of the wanted runs that a training made; none where it is not complete."""
        runs = self._chain(list(self._stage.lineage), params_of(training, comparison, self._params), {})
        if runs is None:
            return {}
        train, evaluation = runs[TRAIN], runs[STAGE]
        if len(training.seeds) == 1:
            metrics = {key.removeprefix("eval/"): value for key, value in evaluation.data.metrics.items()}
            return {run: _of_seed(run, train, metrics, members=1) for run in wanted}
        of_each = self._read_table(evaluation)
        found = (run for run in wanted if run.seed in of_each)
        return {run: _of_seed(run, train, of_each[run.seed], members=len(training.seeds)) for run in found}

    def _chain(self, names: Sequence[str], params: Mapping[str, Any], outs: Mapping[str, str]) -> dict[str, Run] | None:
        """Return a run of each stage with these params, each of which read what the ones before it wrote; None if none.

        The newest runs are preferred, and those that were not rebuilt. A state may have other outs on another kind of
        machine, so where the stages that follow have no run of the newest outs, older ones are tried. A stage before
        training needs no run where `dvc.lock` has its state: a run of other code, with the same outs, may stand for it.
        """
        if not names:
            return {}
        entry = self._entry(self._stage.pipeline[names[0]], params, outs)
        found = self._find({"state": state_key(names[0], entry)}, finished=True) if entry else []
        if entry and not found and (locked := self._locked_outs(names[0], entry)) is not None:
            return self._chain(names[1:], params, {**outs, **locked})
        tried: list[dict[str, str]] = []
        for run in sorted(found, key=lambda run: REBUILT in run.data.tags):
            written = outputs(run.data.tags)
            if written not in tried and (rest := self._chain(names[1:], params, {**outs, **written})) is not None:
                return {names[0]: run, **rest}
            tried.append(written)
        return None

    def _entry(self, spec: StageSpec, params: Mapping[str, Any], outs: Mapping[str, str]) -> Entry | None:
        """Return what determines a stage's outs; None where the digest of a dep is unknown."""
        contents = {name: params if name == str(PARAMS) else read_yaml(Path(name)) for name in spec.params}
        values = {name: values_of(contents[name], keys, name) for name, keys in spec.params.items()}
        deps = {dep: self._dep(dep, outs) for dep in spec.deps}
        known = {dep: md5 for dep, md5 in deps.items() if md5 is not None}
        return Entry(cmd=spec.cmd, params=values, deps=known) if len(known) == len(deps) else None

    def _locked_outs(self, name: str, entry: Entry) -> dict[str, str] | None:
        """Return the outs of a stage before training, out → digest, if `dvc.lock` has its state."""
        if name in (TRAIN, STAGE) or name not in self._lock or locked_entry(self._lock[name]) != entry:
            return None
        return {out["path"]: out["md5"] for out in self._lock[name].get("outs", ())}

    def _dep(self, dep: str, outs: Mapping[str, str]) -> str | None:
        """Return the digest of a dep: of an upstream stage's out, or else (code) of the file as it is now."""
        for out, md5 in outs.items():
            if contains_path(out, dep):
                return digest_within(out, md5, dep)
        if dep not in self._digests:
            self._digests[dep] = digest(Path(dep))
        return self._digests[dep]

    @cached_property
    def _lock(self) -> dict[str, Any]:
        return read_locks(Path())

    @cached_property
    def _params(self) -> dict[str, Any]:
        return read_yaml(PARAMS)


def _of_seed(planned: PlannedRun, train: Run, metrics: Mapping[str, float], *, members: int) -> CompletedRun:
    tags, seconds = train.data.tags, train.data.metrics.get("train/seconds")
    return CompletedRun(
        planned=planned,
        accuracy=metrics["accuracy"],
        loss=metrics["loss"],
        seconds=None if seconds is None else seconds / members,
        compile_seconds=train.data.metrics.get("train/compile_total_seconds"),
        began=train.info.start_time / 1000,
        ended=train.info.end_time / 1000,
        machine=tags.get("machine"),
        dataset=f"{tags['dataset']} {tags['dataset_digest'][:8]}",
        run_id=train.info.run_id,
        accuracy_corrected=metrics.get("accuracy_corrected_labels"),
    )
