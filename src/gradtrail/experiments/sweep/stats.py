"""Statistics of a comparison: metrics of each variant, and whether it differs significantly from the baseline.

Two trainings with the same seed start from the same weights and see the examples in the same order, so they are
compared in pairs, which removes the effect of the seed. The tests cover the seed only: with another test split the
result may differ.

Intervals and tests are duals: with m variants, all m intervals hold together with a probability of at least 95 %
(Bonferroni), and a difference is significant if and only if its interval excludes 0, that is, if m times its p value is
below 5 %. Holm's step-down tests may reject more, but have no informative intervals.

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
    """The results of a variant."""

    label: str
    runs: tuple[CompletedRun, ...]  # at least one, ordered by seed
    is_baseline: bool  # True if the other variants are compared with this one
    difference: Difference | None  # accuracies minus the baseline's, over the common seeds; None without any
    log_time_ratio: Difference | None  # the same for log training times, over seeds with comparable times

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
    by_label = {label: [run for run in runs if run.planned.label == label] for label in comparison.variants}
    pairs = {
        label: [(run, baseline[run.planned.seed]) for run in variant_runs if run.planned.seed in baseline]
        for label, variant_runs in by_label.items()
        if label != comparison.baseline
    }
    timed = {
        label: [pair for pair in variant_pairs if are_times_comparable(*pair, runs)]
        for label, variant_pairs in pairs.items()
    }
    differences = _differences(pairs, lambda run: run.accuracy)
    log_time_ratios = _differences(timed, lambda run: math.log(run.seconds or 1))
    return [
        Summary(
            label=label,
            runs=tuple(sorted(variant_runs, key=lambda run: run.planned.seed)),
            is_baseline=label == comparison.baseline,
            difference=differences.get(label),
            log_time_ratio=log_time_ratios.get(label),
        )
        for label, variant_runs in by_label.items()
        if variant_runs
    ]


def are_times_comparable(run: CompletedRun, other: CompletedRun, runs: Sequence[CompletedRun]) -> bool:
    """Whether two trainings with the same seed were timed under the same conditions, given all runs.

    Both were timed on the same kind of machine, no run overlaps with them in time, and one followed the other within an
    hour, with only runs of their seed in between.
    """
    first, last = sorted((run, other), key=lambda training: training.began)
    if not (run.seconds and other.seconds and run.machine) or run.machine != other.machine:
        return False
    if not first.ended <= last.began <= first.ended + _CLOSE_SECONDS:
        return False
    remaining = [third for third in runs if third not in (run, other)]
    if any(_overlaps(third, pair.began, pair.ended) for third in remaining for pair in (first, last)):
        return False
    between = [third for third in remaining if _overlaps(third, first.began, last.ended)]
    return all(third.planned.seed == run.planned.seed for third in between)


def _overlaps(run: CompletedRun, began: float, ended: float) -> bool:
    return run.began < ended and began < run.ended


def _differences(pairs: Mapping[str, Sequence[_Pair]], value: Callable[[CompletedRun], float]) -> dict[str, Difference]:
    """Return the difference of each variant that has a pair; variants with one pair do not count as comparisons."""
    num_comparisons = max(1, sum(len(variant_pairs) > 1 for variant_pairs in pairs.values()))
    return {
        label: paired_difference(
            [value(run) for run, _ in variant_pairs],
            [value(other) for _, other in variant_pairs],
            num_comparisons=num_comparisons,
        )
        for label, variant_pairs in pairs.items()
        if variant_pairs
    }


def _median(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None
