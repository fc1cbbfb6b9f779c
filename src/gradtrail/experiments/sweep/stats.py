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

import numpy as np
from scipy import stats

from gradtrail.experiments.sweep.runs import CompletedRun
from gradtrail.experiments.sweep.spec import Comparison

LEVEL = 0.05
_EQUAL = 1e-9  # metrics are stored with 9 digits, so values closer than this are equal
_CLOSE_SECONDS = 3600.0

_Pair = tuple[CompletedRun, CompletedRun]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of paired differences.

    Attributes:
        mean: mean over all pairs.
        low: lower end of the simultaneous 95 % confidence interval; −∞ where it has no end, NaN with a single pair.
        high: upper end; ∞ and NaN likewise.
        p_value: for the hypothesis that there is no difference, adjusted for the number of comparisons; NaN with a
            single pair.
        num_pairs: at least 1.
    """

    mean: float
    low: float
    high: float
    p_value: float
    num_pairs: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def has_interval(self) -> bool:
        """Whether both ends of the interval are known."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def paired_difference(values: Sequence[float], baseline: Sequence[float], *, num_comparisons: int = 1) -> Difference:
    """Compare values in pairs by Student's t-test, two-sided, one of `num_comparisons` that are made together.

    Where all differences are the same number, their spread is 0 and the t-test is undefined. If the number is 0, p = 1
    and the interval is 0. Otherwise the exact sign test is used, which needs no spread: n equal signs have
    p = 2 · 2⁻ⁿ, and its interval for the median, from the least to the greatest difference, is that number if the
    adjusted p is below the level, and else has no ends.

    Args:
        values: at least one.
        baseline: of the same length; values at the same index are a pair.
        num_comparisons: at least 1; the p value is multiplied by it, up to 1, and the interval's level is
            1 − 0.05 / `num_comparisons`.
    """
    differences = np.subtract(values, baseline)
    count, mean = len(differences), float(np.mean(differences))
    if count < 2:
        low, high, p_value = math.nan, math.nan, math.nan
    elif np.ptp(differences) > _EQUAL:
        test = stats.ttest_1samp(differences, 0)
        low, high = map(float, test.confidence_interval(1 - LEVEL / num_comparisons))
        p_value = min(1.0, num_comparisons * float(test.pvalue))
    elif abs(mean) <= _EQUAL:
        mean, low, high, p_value = 0.0, 0.0, 0.0, 1.0
    else:
        p_value = min(1.0, num_comparisons * 2.0 ** (1 - count))
        low, high = (mean, mean) if p_value < LEVEL else (-math.inf, math.inf)
    return Difference(mean=mean, low=low, high=high, p_value=p_value, num_pairs=count)


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
