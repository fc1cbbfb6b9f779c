"""Statistics of a comparison: metrics of each variant, and whether it differs significantly from the baseline.

Two trainings with the same seed start from the same weights and see the examples in the same order, so they are
compared in pairs. The tests cover the seed only: with another test split the result may differ.

Intervals and tests are duals: with m variants, all m intervals hold together with a probability of at least 95 %
(Bonferroni), and a difference is significant if and only if its interval excludes 0, that is, if m times its p value is
below 5 %. Holm's step-down tests may reject more, but have no informative intervals.

Source: O. J. Dunn, "Multiple comparisons among means", Journal of the American Statistical Association 56 (1961).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradtrail.experiments.compare.plan import CompletedRun
from gradtrail.support.significance import Difference, paired_difference

_CLOSE_SECONDS = 3600.0
SIGNIFICANT = "significant"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a variant."""

    variant: str
    runs: tuple[CompletedRun, ...]  # at least one, ordered by seed
    is_baseline: bool
    difference: Difference | None  # accuracies minus the baseline's, over the common seeds; None without any
    log_time_ratio: Difference | None  # the same for log training times, over seeds with comparable times

    @property
    def accuracies(self) -> tuple[float, ...]:
        """The accuracies on the test split, in the order of the seeds."""
        return tuple(run.test_accuracy for run in self.runs)

    @property
    def mean(self) -> float:
        """The mean accuracy."""
        return statistics.mean(self.accuracies)

    @property
    def seconds(self) -> float | None:
        """The median time of the training loop; None if none is known."""
        return median([run.train_seconds for run in self.runs])

    @property
    def verdict(self) -> str:
        """Whether the difference is significant, as text."""
        if self.is_baseline:
            return "baseline"
        if self.difference is None:
            return "unknown: no seed in common"
        if self.difference.num_pairs < 2:
            return "unknown: one seed"
        return SIGNIFICANT if self.difference.is_significant else "not significant"


def summarize(runs: Sequence[CompletedRun], baseline: str | None) -> list[Summary]:
    """Summarize the runs of each variant, in the order of the runs; without a baseline nothing is compared."""
    by_variant: dict[str, list[CompletedRun]] = {run.variant: [] for run in runs}
    for run in sorted(runs, key=lambda run: run.seed):
        by_variant[run.variant].append(run)
    baseline_runs = {run.seed: run for run in by_variant.get(baseline or "", ())}
    pairs = {
        variant: [(run, baseline_runs[run.seed]) for run in variant_runs if run.seed in baseline_runs]
        for variant, variant_runs in by_variant.items()
        if variant != baseline
    }
    timed = {
        variant: [pair for pair in variant_pairs if are_times_comparable(*pair, runs)]
        for variant, variant_pairs in pairs.items()
    }
    differences = _differences(pairs, lambda run: run.test_accuracy)
    log_time_ratios = _differences(timed, lambda run: math.log(run.train_seconds or 1))
    return [
        Summary(
            variant=variant,
            runs=tuple(variant_runs),
            is_baseline=variant == baseline,
            difference=differences.get(variant),
            log_time_ratio=log_time_ratios.get(variant),
        )
        for variant, variant_runs in by_variant.items()
    ]


def are_times_comparable(run: CompletedRun, other: CompletedRun, runs: Sequence[CompletedRun]) -> bool:
    """Whether two trainings with the same seed were timed under the same conditions, given all runs.

    Both were timed on the same kind of machine, no run overlaps with them in time, and one followed the other within an
    hour, with only runs of their seed in between.
    """
    first, last = sorted((run, other), key=lambda training: training.began)
    if not (run.train_seconds and other.train_seconds and run.machine) or run.machine != other.machine:
        return False
    if not first.ended <= last.began <= first.ended + _CLOSE_SECONDS:
        return False
    remaining = [third for third in runs if third not in (run, other)]
    if any(_overlaps(third, pair.began, pair.ended) for third in remaining for pair in (first, last)):
        return False
    between = [third for third in remaining if _overlaps(third, first.began, last.ended)]
    return all(third.seed == run.seed for third in between)


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None if none is."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def _overlaps(run: CompletedRun, began: float, ended: float) -> bool:
    return run.began < ended and began < run.ended


def _differences(
    pairs: Mapping[str, Sequence[tuple[CompletedRun, CompletedRun]]], value: Callable[[CompletedRun], float]
) -> dict[str, Difference]:
    """Return the difference of each variant that has a pair; variants with one pair do not count as comparisons."""
    num_comparisons = max(1, sum(len(variant_pairs) > 1 for variant_pairs in pairs.values()))
    return {
        variant: paired_difference(
            [value(run) for run, _ in variant_pairs],
            [value(other) for _, other in variant_pairs],
            num_comparisons=num_comparisons,
        )
        for variant, variant_pairs in pairs.items()
        if variant_pairs
    }
