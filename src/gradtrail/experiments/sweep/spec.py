"""The comparisons of `experiments.yaml`: the runs of each, and the DVC experiments that make them.

A comparison compares variants, which are changes to `params.yaml`, with the first of them, over the same seeds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradtrail.stages.artifacts.members import format_seeds
from gradtrail.stages.common.params import MEMBERS, PARAMS, SEED, VARY, changed, read_yaml, require_known, validate
from gradtrail.stages.common.pipeline_file import read_pipeline, stages_before
from gradtrail.support.errors import UserError, suggestion

PATH = Path("experiments.yaml")
_RECIPE = "set"  # key of the entries that are recipes, not comparisons
STAGE = "evaluate"  # the last stage that a comparison or a recipe runs


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A question, and the runs that answer it.

    With `timed`, training times are compared: every seed is a separate experiment, and the variants of a seed run one
    after the other. Otherwise the seeds of a variant are the members of one training.
    """

    about: str  # the question
    seeds: tuple[int, ...]  # seeds of the training
    variants: dict[str, dict[str, Any]]  # label → changes to the params; the first is the baseline
    timed: bool = False

    @property
    def baseline(self) -> str:
        """The label of the variant that the others are compared with."""
        return next(iter(self.variants))


@dataclass(frozen=True, order=True)
class PlannedRun:
    """A run of a comparison."""

    label: str
    seed: int

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"


@dataclass(frozen=True, order=True)
class Training:
    """A training of a variant, whose members are the runs of consecutive seeds."""

    label: str
    seeds: range

    def __str__(self) -> str:
        return f"{self.label}, {format_seeds(self.seeds)}"

    @property
    def runs(self) -> list[PlannedRun]:
        """The runs of its members."""
        return [PlannedRun(self.label, seed) for seed in self.seeds]

    def changes(self, comparison: Comparison) -> dict[str, Any]:
        """Return its changes to the params."""
        return comparison.variants[self.label] | {SEED: self.seeds[0], MEMBERS: len(self.seeds)}


def read_comparisons(path: Path = PATH) -> dict[str, Comparison]:
    """Read all comparisons.

    Raises:
        UserError: A comparison is invalid; the message names it and the fault.
    """
    params = read_yaml(PARAMS)
    pipeline = read_pipeline()
    sections = (*stages_before(STAGE, pipeline), STAGE)
    comparisons = {
        name: validate(content, Comparison, f"{path}: {name}")
        for name, content in read_yaml(path).items()
        if not is_recipe(content)
    }
    for name, comparison in comparisons.items():
        _validate(comparison, f"{path}: {name}", params, sections)
    return comparisons


def is_recipe(content: Any) -> bool:
    """Whether an entry of `experiments.yaml` is a recipe, with `set`, and not a comparison, with `variants`."""
    return isinstance(content, dict) and _RECIPE in content


def choose(name: str) -> Comparison:
    """Return the comparison of that name, or raise UserError."""
    comparisons = read_comparisons()
    if name not in comparisons:
        raise UserError(f"{PATH}: no comparison {name}; it has {', '.join(comparisons)}{suggestion(name, comparisons)}")
    return comparisons[name]


def require_seeds(seeds: Sequence[int], name: str) -> tuple[int, ...]:
    """Return the seeds; raise UserError if there are none, one is repeated, or one is invalid."""
    are_integers = all(type(seed) is int for seed in seeds)
    if not seeds or not are_integers or len({*seeds}) < len(seeds) or min(seeds) < 0 or max(seeds) >= 2**32:
        rule = f"distinct integers from 0 to {2**32 - 1:,}, such as 0,1,2"
        raise UserError(f"{name}: must be {rule}; got {', '.join(map(str, seeds))}")
    return tuple(seeds)


def planned_runs(comparison: Comparison, seeds: Iterable[int]) -> list[PlannedRun]:
    """Return all runs of a comparison, by variant and then by seed."""
    seeds = tuple(seeds)
    return [PlannedRun(label, seed) for label in comparison.variants for seed in seeds]


def params_of(training: Training, comparison: Comparison, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested params of a training of a comparison, given the content of `params.yaml`."""
    return changed(params, training.changes(comparison))


def trainings_of(runs: Iterable[PlannedRun], *, together: bool) -> list[Training]:
    """Return the trainings of runs: one per run or, if `together`, one for consecutive seeds of a variant.

    They are ordered by their first seed, and within a seed at random (the same on every call), so that drift, such as
    other load, affects all variants alike.
    """
    trainings: list[Training] = []
    for run in sorted(runs):
        last = trainings[-1] if trainings else None
        if together and last and last.label == run.label and last.seeds.stop == run.seed:
            trainings[-1] = Training(run.label, range(last.seeds.start, run.seed + 1))
        else:
            trainings.append(Training(run.label, range(run.seed, run.seed + 1)))
    shuffled = [trainings[place] for place in np.random.default_rng(0).permutation(len(trainings))]
    return sorted(shuffled, key=lambda training: training.seeds.start)


def _validate(comparison: Comparison, name: str, params: Mapping[str, Any], sections: Sequence[str]) -> None:
    require_seeds(comparison.seeds, f"{name}.seeds")
    if len(comparison.variants) < 2:
        raise UserError(f"{name}.variants: at least two are needed; the first is the baseline")
    for label, changes in comparison.variants.items():
        place = f"{name}.variants.{label}"
        require_known(params, changes, place)
        for key in changes:
            if key in (SEED, MEMBERS, VARY):
                raise UserError(f"{place}.{key}: all variants use the same seeds, those in {name}.seeds")
            if key.partition(".")[0] not in sections:
                raise UserError(f"{place}.{key} changes neither training nor evaluation")
