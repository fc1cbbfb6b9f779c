"""Finds the completed runs of a comparison in MLflow, by what DVC itself compares.

A planned run is complete if DVC would find nothing to do for its params: each stage up to the evaluation has a finished
run with the same command, params, versions, code and data as `dvc.lock` would record. Runs of other code or other raw
data are therefore never mixed in. Runs on any kind of machine count; `stats.py` decides whose times are comparable.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow.entities import Run

from gradtrail.experiments.sweep.members import ReadTable, seeds_trained, varies_all
from gradtrail.experiments.sweep.spec import STAGE, Comparison, PlannedRun, Training, params_of
from gradtrail.stages.common.pipeline_file import TRAIN, stages_before
from gradtrail.tracking.lineage.state import PlannedStages, state_key
from gradtrail.tracking.mlflow.search import Find
from gradtrail.tracking.mlflow.stored_run import REBUILT
from gradtrail.tracking.mlflow.tags import outputs


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """The metrics of a planned run that is complete."""

    planned: PlannedRun
    accuracy: float  # on the test split
    loss: float  # mean loss on the test split
    seconds: float | None  # time of the training loop, per member; None for a rebuilt run, whose time is unknown
    compile_seconds: float | None  # compile time of the training stage; None for a rebuilt run
    began: float  # start of the training's run, in seconds since 1970
    ended: float  # its end
    machine: str | None  # kind of machine that trained; None if unknown
    dataset: str  # name of the data set and the first digits of its digest
    run_id: str  # MLflow's id of the training's run
    accuracy_corrected: float | None = None  # on the test split with corrected labels; None without corrections


class RunFinder:
    """Finds completed runs.

    Args:
        find: A search of runs by their tags.
        read_table: A function that returns the metrics of each member, given an evaluation's run.
    """

    def __init__(self, find: Find, read_table: ReadTable):
        self._find = find
        self._read_table = read_table
        self._stages = PlannedStages()

    def find(self, planned: Iterable[PlannedRun], comparison: Comparison) -> list[CompletedRun]:
        """Return the planned runs that are complete, in their order; of several trainings of one seed, the newest."""
        planned = list(planned)
        trainings = [] if comparison.timed else self._find({"stage": TRAIN}, finished=True)  # whose times are shared
        varies = varies_all(self._stages.params)
        several = {seeds for run in trainings if varies and (seeds := seeds_trained(run))}
        trained = [range(run.seed, run.seed + 1) for run in planned] + sorted(
            several, key=lambda seeds: (len(seeds), seeds.start)
        )
        completed: dict[PlannedRun, CompletedRun] = {}
        for label in comparison.variants:
            for seeds in dict.fromkeys(trained):
                open_runs = [
                    run for run in planned if run.label == label and run.seed in seeds and run not in completed
                ]
                if open_runs:
                    completed |= self._completed(Training(label, seeds), open_runs, comparison)
        return [completed[run] for run in planned if run in completed]

    def _completed(
        self, training: Training, planned: Sequence[PlannedRun], comparison: Comparison
    ) -> dict[PlannedRun, CompletedRun]:
        """Return those of the planned runs that a training completed; none if the training itself is incomplete."""
        params = params_of(training, comparison, self._stages.params)
        runs = self._chain([*stages_before(STAGE, self._stages.pipeline), STAGE], params, {})
        if runs is None:
            return {}
        train, evaluation = runs[TRAIN], runs[STAGE]
        if len(training.seeds) == 1:
            metrics = {key.removeprefix("eval/"): value for key, value in evaluation.data.metrics.items()}
            return {run: _completed_run(run, train, metrics, members=1) for run in planned}
        per_seed = self._read_table(evaluation)
        members = len(training.seeds)
        return {
            run: _completed_run(run, train, per_seed[run.seed], members=members)
            for run in planned
            if run.seed in per_seed
        }

    def _chain(self, names: Sequence[str], params: Mapping[str, Any], outs: Mapping[str, str]) -> dict[str, Run] | None:
        """Return a finished run of each stage with these params, each with the outputs of the run before it as inputs.

        The newest runs are preferred, and those that were not rebuilt. A state may have other outputs on another kind
        of machine; so older runs are tried if the later stages have no run with the newest outputs. A stage before
        training needs no run if `dvc.lock` records its state: a run of other code with the same outputs may stand for
        it. Returns None if a run is missing.
        """
        if not names:
            return {}
        stage, *rest = names
        entry = self._stages.entry(stage, params, outs)
        if entry is None:
            return None
        runs = self._find({"state": state_key(stage, entry)}, finished=True)
        if not runs and stage not in (TRAIN, STAGE) and (locked := self._stages.locked_outs(stage, entry)) is not None:
            return self._chain(rest, params, {**outs, **locked})
        tried: list[dict[str, str]] = []
        for run in sorted(runs, key=lambda run: REBUILT in run.data.tags):
            written = outputs(run.data.tags)
            if written not in tried and (later := self._chain(rest, params, {**outs, **written})) is not None:
                return {stage: run, **later}
            tried.append(written)
        return None


def _completed_run(planned: PlannedRun, train: Run, metrics: Mapping[str, float], *, members: int) -> CompletedRun:
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
