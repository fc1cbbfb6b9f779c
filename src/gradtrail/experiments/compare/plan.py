"""Which runs of a comparison are complete, and what the missing ones would take.

A planned run is complete if DVC would find nothing to do for its params: each stage up to the evaluation has a finished
run with the same command, params, versions, code and data as `dvc.lock` would record. Runs of all machines count.
"""

import csv
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlflow.entities import Run

from gradtrail.experiments.compare.spec import STAGE, Comparison
from gradtrail.experiments.estimate import EarlierRun, by_similarity
from gradtrail.stages.common.params import MEMBERS, SEED, VARY, changed
from gradtrail.stages.common.pipeline_file import TRAIN, stages_before
from gradtrail.stages.model.members import format_seeds
from gradtrail.tracking.artifacts import read_artifact
from gradtrail.tracking.runs import Find, StoredRuns
from gradtrail.tracking.state import PlannedStages, state_key
from gradtrail.tracking.store import open_store
from gradtrail.tracking.sync import sync
from gradtrail.tracking.tags import BEGAN, REBUILT, outputs

_MEMBERS_TABLE = "results/members.csv"  # artifact of an evaluation: a row per member
_SECONDS, _COMPILE_SECONDS, _COST = "train/seconds", "train/compile_total_seconds", "train/cost"
_VARIED = {"initialization", "order", "augmentation", "dropout"}  # as core/train/config.py has it, which imports JAX


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """The metrics of a planned run that is complete: a row of the CSV file."""

    variant: str
    seed: int
    test_accuracy: float
    test_balanced_accuracy: float | None  # None if the classes are of about equal size
    test_accuracy_corrected_labels: float | None  # None without corrections
    test_loss: float
    train_seconds: float | None  # time of the training loop, per member; None for a rebuilt run
    compile_seconds: float | None  # None for a rebuilt run
    cost: float | None  # of the training, per member; None without `runtime.price_per_hour`
    began: float  # start of the attempt whose seconds these are, in seconds since 1970
    ended: float
    machine: str | None  # kind of machine that trained; None if unknown
    num_parameters: float | None
    dataset: str  # name of the data set and the first digits of its digest
    mlflow_run: str  # id of the training's run


class Planner:
    """Finds the completed runs of comparisons, after one search of the store for each stage up to the evaluation."""

    def __init__(self, find: Find, read_members: Callable[[Run], Mapping[int, Mapping[str, float]]]):
        self._read_members = read_members
        self._stages = PlannedStages()
        self._chain = [*stages_before(STAGE, self._stages.pipeline), STAGE]
        self._by_state: dict[str, list[Run]] = defaultdict(list)
        runs = {stage: find({"stage": stage}, finished=True) for stage in self._chain}
        for run in sorted(itertools.chain(*runs.values()), key=lambda run: REBUILT in run.data.tags):
            self._by_state[run.data.tags["state"]].append(run)
        self._seeds_together = {seeds for run in runs[TRAIN] if (seeds := _seeds_together(run))}
        self._trained = runs[TRAIN]

    def completed(self, comparison: Comparison) -> list[CompletedRun]:
        """Return the completed runs, in the order of the comparison; of several trainings of a seed, the newest.

        A member of a training counts as the run of its seed, unless times are compared.
        """
        alone = [range(seed, seed + 1) for seed in comparison.seeds]
        together = self._seeds_together if self._is_together(comparison) else set()
        trainings = [*alone, *sorted(together, key=lambda seeds: (len(seeds), seeds.start))]
        completed: dict[tuple[str, int], CompletedRun] = {}
        for variant, seeds in itertools.product(comparison.variants, trainings):
            if any(seed in seeds and (variant, seed) not in completed for seed in comparison.seeds):
                for run in self._runs_of(comparison, variant, seeds):
                    completed.setdefault((variant, run.seed), run)
        return [completed[run] for run in comparison.runs if run in completed]

    def trainings(self, comparison: Comparison, completed: Sequence[CompletedRun] = ()) -> dict[str, dict[str, Any]]:
        """Return the trainings of the runs that are not among the completed ones: label → changes to the params."""
        complete = {(run.variant, run.seed) for run in completed}
        missing = [run for run in comparison.runs if run not in complete]
        return trainings_of(comparison, missing, together=self._is_together(comparison))

    def training(self, changes: Mapping[str, Any], accept: Callable[[Run], bool]) -> Run | None:
        """Return a finished and accepted run of a training with these changes to the params; None if there is none."""
        chain = self._chain[: self._chain.index(TRAIN) + 1]
        runs = self._find(chain, changed(self._stages.params, changes), {}, accept)
        return runs[TRAIN] if runs else None

    def seconds(self, changes: Mapping[str, Any]) -> tuple[float, EarlierRun] | None:
        """Return the seconds of the training that is most similar to one with these changes; None without any."""
        for earlier in by_similarity(self._trained, changed(self._stages.params, changes)):
            metrics = earlier.run.data.metrics
            if _SECONDS in metrics:
                return metrics[_SECONDS] + metrics.get(_COMPILE_SECONDS, 0.0), earlier
        return None

    def _is_together(self, comparison: Comparison) -> bool:
        """Whether seeds are trained together: members that share random numbers differ from trainings of one seed."""
        return not comparison.timed and {*self._stages.params["train"]["vary"]} == _VARIED

    def _runs_of(self, comparison: Comparison, variant: str, seeds: range) -> Iterator[CompletedRun]:
        """Yield the run of each seed of a training; nothing if the training is incomplete."""
        runs = self._find(self._chain, changed(self._stages.params, comparison.changes(variant, seeds)), {})
        if runs is None:
            return
        train, evaluation = runs[TRAIN], runs[STAGE]
        if len(seeds) > 1:
            members = self._read_members(evaluation)
        else:
            members = {seeds[0]: {key.removeprefix("eval/"): value for key, value in evaluation.data.metrics.items()}}
        tags, timings = train.data.tags, train.data.metrics
        for seed, metrics in members.items():
            yield CompletedRun(
                variant=variant,
                seed=seed,
                test_accuracy=metrics["accuracy"],
                test_balanced_accuracy=metrics.get("balanced_accuracy"),
                test_accuracy_corrected_labels=metrics.get("accuracy_corrected_labels"),
                test_loss=metrics["loss"],
                train_seconds=timings[_SECONDS] / len(seeds) if _SECONDS in timings else None,
                compile_seconds=timings.get(_COMPILE_SECONDS),
                cost=timings[_COST] / len(seeds) if _COST in timings else None,
                began=int(tags.get(BEGAN, train.info.start_time)) / 1000,
                ended=train.info.end_time / 1000,
                machine=tags.get("machine"),
                num_parameters=timings.get("train/num_parameters"),
                dataset=f"{tags['dataset']} {tags['dataset_digest'][:8]}",
                mlflow_run=train.info.run_id,
            )

    def _find(
        self,
        names: Sequence[str],
        params: Mapping[str, Any],
        outs: Mapping[str, str],
        accept: Callable[[Run], bool] = lambda _: True,
    ) -> dict[str, Run] | None:
        """Return a finished run of each stage with these params, each with the outputs of the run before it as inputs.

        The newest runs are preferred, and those that were not rebuilt. A state may have other outputs on another kind
        of machine; so older runs are tried if the later stages have no run with the newest outputs. A stage before
        training needs no run if `dvc.lock` records its state: a run of other code with the same outputs may stand for
        it. Returns None if a run is missing. `accept` chooses among the runs of the last stage.
        """
        if not names:
            return {}
        stage, *rest = names
        entry = self._stages.entry(stage, params, outs)
        if entry is None:
            return None
        runs = self._by_state.get(state_key(stage, entry), [])
        if not runs and stage not in (TRAIN, STAGE) and (locked := self._stages.locked_outs(stage, entry)) is not None:
            return self._find(rest, params, {**outs, **locked}, accept)
        tried: list[dict[str, str]] = []
        for run in runs:
            written = outputs(run.data.tags)
            if written in tried or not (rest or accept(run)):
                continue
            if (later := self._find(rest, params, {**outs, **written}, accept)) is not None:
                return {stage: run, **later}
            tried.append(written)
        return None


def read_store() -> Planner:
    """Return the planner of the store, after a sync: DVC may have restored outputs that have no run in MLflow."""
    sync()
    client = open_store()

    def read_members(evaluation: Run) -> dict[int, dict[str, float]]:
        lines = read_artifact(client, evaluation.info.run_id, _MEMBERS_TABLE).splitlines()
        return {int(row["seed"]): {key: float(value) for key, value in row.items()} for row in csv.DictReader(lines)}

    return Planner(StoredRuns(client), read_members)


def trainings_of(
    comparison: Comparison, runs: Iterable[tuple[str, int]], *, together: bool
) -> dict[str, dict[str, Any]]:
    """Return label → changes to the params: one training per run or, if `together`, one for consecutive seeds.

    They are ordered by their first seed, and within a seed at random (the same on every call), so that drift, such as
    other load, affects all variants alike.
    """
    trainings: list[tuple[str, range]] = []
    for variant, seed in sorted(runs):
        last_variant, last_seeds = trainings[-1] if trainings else ("", range(0))
        if together and (variant, seed) == (last_variant, last_seeds.stop):
            trainings[-1] = variant, range(last_seeds.start, seed + 1)
        else:
            trainings.append((variant, range(seed, seed + 1)))
    shuffled = [trainings[place] for place in np.random.default_rng(0).permutation(len(trainings))]
    ordered = sorted(shuffled, key=lambda training: training[1].start)
    return {f"{variant}, {format_seeds(seeds)}": comparison.changes(variant, seeds) for variant, seeds in ordered}


def _seeds_together(run: Run) -> range | None:
    """Return the seeds of a training's run; None if it has one member, or if the members share random numbers."""
    params = run.data.params
    members = int(params.get(MEMBERS, 1))
    if members == 1 or {*re.findall(r"\w+", params[VARY])} != _VARIED:
        return None
    return range(int(params[SEED]), int(params[SEED]) + members)
