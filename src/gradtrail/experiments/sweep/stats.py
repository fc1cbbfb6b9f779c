"""Statistics of a comparison: metrics of each variant, and whether it differs significantly from the baseline.

Two trainings with the same seed start from the same weights and see the examples in the same order, so they are
compared in pairs, which removes the effect of the seed. The tests are about the seed only: with another test split the
result may differ.

Intervals and tests are duals: with m variants, all m intervals hold together with a probability of at least 95 %
(Bonferroni), and a difference is significant exactly where its interval excludes 0, which is where m times its p value
is below 5 %. Holm's step-down tests may reject more, but no informative intervals belong to them.

Source: O. J. Dunn, "Multiple comparisons among means", Journal of the American Statistical Association 56 (1961).
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradtrail.experiments.sweep.runs import CompletedRun
from gradtrail.experiments.sweep.spec import Comparison
from gradtrail.support.significance import Difference, paired_difference

_CLOSE_SECONDS = 3600.0

_Pair = tuple[CompletedRun, CompletedRun]

SIGNIFICANT, NOT_SIGNIFICANT = "significant", "not significant"
_ONE_SEED, _NO_SEED = "unknown: one seed", "unknown: no seed in common"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a variant.

    Attributes:
        runs: at least one, ordered by seed.
        is_baseline: whether the other variants are compared with this one.
        difference: difference of the accuracies to the baseline, over the seeds that both have; None if there are none.
        log_time_ratio: difference of the logarithms of the training times, over the seeds whose times are comparable;
            None if there are none.
    """

    label: str
    runs: tuple[CompletedRun, ...]
    is_baseline: bool
    difference: Difference | None
    log_time_ratio: Difference | None

    @property
    def accuracies(self) -> tuple[float, ...]:
        """The accuracies on the test split, in the order of the seeds."""
        return tuple(run.accuracy for run in self.runs)

    @property
    def mean(self) -> float:
        """The mean accuracy."""
        return statistics.mean(self.accuracies)

    @property
    def loss(self) -> float:
        """The mean loss on the test split."""
        return statistics.mean(run.loss for run in self.runs)

    @property
    def seconds(self) -> float | None:
        """The median time of the training loop."""
        return _median([run.seconds for run in self.runs])

    @property
    def compile_seconds(self) -> float | None:
        """The median time of compiling."""
        return _median([run.compile_seconds for run in self.runs])

    @property
    def verdict(self) -> str:
        """Whether the difference is significant, as text."""
        if self.is_baseline:
            return "baseline"
        if self.difference is None:
            return _NO_SEED
        if self.difference.num_pairs < 2:
            return _ONE_SEED
        return SIGNIFICANT if self.difference.is_significant else NOT_SIGNIFICANT


def summarize(runs: Sequence[CompletedRun], comparison: Comparison) -> list[Summary]:
    """Summarize the runs of each variant that has any, in the order of the comparison."""
    baseline = {run.planned.seed: run for run in runs if run.planned.label == comparison.baseline}
    own = {label: [run for run in runs if run.planned.label == label] for label in comparison.variants}
    others = (label for label in comparison.variants if label != comparison.baseline)
    pairs = {
        label: [(run, baseline[run.planned.seed]) for run in own[label] if run.planned.seed in baseline]
        for label in others
    }
    timed = {label: [pair for pair in found if are_times_comparable(*pair, runs)] for label, found in pairs.items()}
    differences = _differences(pairs, lambda run: run.accuracy)
    log_time_ratios = _differences(timed, lambda run: math.log(run.seconds or 1))
    return [
        Summary(
            label=label,
            runs=tuple(sorted(found, key=lambda run: run.planned.seed)),
            is_baseline=label == comparison.baseline,
            difference=differences.get(label),
            log_time_ratio=log_time_ratios.get(label),
        )
        for label, found in own.items()
        if found
    ]


def are_times_comparable(run: CompletedRun, other: CompletedRun, runs: Sequence[CompletedRun]) -> bool:
    """Whether two trainings with the same seed were timed under conditions that are alike, given all runs.

    Both were timed, on the same kind of machine, none of the runs overlaps with them in time, and they followed each
    other within an hour, with only runs of their seed in between.
    """
    first, last = sorted((run, other), key=lambda each: each.began)
    if not (run.seconds and other.seconds and run.machine) or run.machine != other.machine:
        return False
    if not first.ended <= last.began <= first.ended + _CLOSE_SECONDS:
        return False
    seed, rest = run.planned.seed, [each for each in runs if each not in (run, other)]
    overlap = any(_overlaps(each, one.began, one.ended) for each in rest for one in (first, last))
    return not overlap and all(each.planned.seed == seed for each in rest if _overlaps(each, first.began, last.ended))


def _overlaps(run: CompletedRun, began: float, ended: float) -> bool:
    return run.began < ended and began < run.ended


def _differences(pairs: Mapping[str, Sequence[_Pair]], value: Callable[[CompletedRun], float]) -> dict[str, Difference]:
    """Return the difference of each variant that has a pair; those with one pair do not count as comparisons."""
    num_comparisons = max(1, sum(len(found) > 1 for found in pairs.values()))
    return {
        label: paired_difference(
            [value(run) for run, _ in found], [value(other) for _, other in found], num_comparisons=num_comparisons
        )
        for label, found in pairs.items()
        if found
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
