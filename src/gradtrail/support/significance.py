"""Tests of significance, each with an interval that excludes 0 exactly if the test rejects."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from gradtrail.core.intervals import SIGNIFICANCE

_EQUAL = 1e-9  # metrics are stored with 9 digits, so values closer than this are equal


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference of means; with a single pair, the interval and the p value are NaN."""

    mean: float
    low: float  # lower end of the 95 % confidence interval, simultaneous over the comparisons; −∞ for none
    high: float  # upper end; ∞ for none
    p_value: float  # for no difference, adjusted for the number of comparisons
    num_pairs: int  # at least 1

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def has_interval(self) -> bool:
        """Whether both ends of the interval are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def paired_difference(values: Sequence[float], baseline: Sequence[float], *, num_comparisons: int = 1) -> Difference:
    """Compare values in pairs by Student's t-test, two-sided, one of `num_comparisons` that are made together.

    The p value is multiplied by their number, up to 1; the interval's level is 1 − `SIGNIFICANCE` / `num_comparisons`.
    If all differences are the same number, the t-test is undefined: p = 1 if the number is 0, else that of the exact
    sign test, 2 · 2⁻ⁿ, whose interval for the median is the number itself if the test rejects, and else has no ends.
    """
    differences = np.subtract(values, baseline)
    count, mean = len(differences), float(np.mean(differences))
    if count < 2:
        low, high, p_value = math.nan, math.nan, math.nan
    elif np.ptp(differences) > _EQUAL:
        test = stats.ttest_1samp(differences, 0)
        low, high = map(float, test.confidence_interval(1 - SIGNIFICANCE / num_comparisons))
        p_value = min(1.0, num_comparisons * float(test.pvalue))
    elif abs(mean) <= _EQUAL:
        mean, low, high, p_value = 0.0, 0.0, 0.0, 1.0
    else:
        p_value = min(1.0, num_comparisons * 2.0 ** (1 - count))
        low, high = (mean, mean) if p_value < SIGNIFICANCE else (-math.inf, math.inf)
    return Difference(mean=mean, low=low, high=high, p_value=p_value, num_pairs=count)


def unpaired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Compare the means of independent values, at least two of each, by the t-test of B. Welch, Biometrika 34 (1947).

    If neither has any spread the test is undefined: then there is no interval, unless the means are equal.
    """
    mean, count = float(np.mean(values) - np.mean(baseline)), min(len(values), len(baseline))
    if max(np.ptp(values), np.ptp(baseline)) > _EQUAL:
        test = stats.ttest_ind(values, baseline, equal_var=False)
        low, high = map(float, test.confidence_interval(1 - SIGNIFICANCE))
        p_value = float(test.pvalue)
    elif abs(mean) <= _EQUAL:
        low, high, p_value = 0.0, 0.0, 1.0
    else:
        low, high, p_value = -math.inf, math.inf, math.nan
    return Difference(mean=mean, low=low, high=high, p_value=p_value, num_pairs=count)


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """The exact McNemar test of two classifiers on the same examples."""

    gained: int  # examples that the new one gets right and the old one wrong
    lost: int  # examples that the new one gets wrong and the old one right
    num_examples: int  # at least 1
    p_value: float  # two-sided, for the hypothesis that a differing example is as likely gained as lost
    low: float  # lower end of the 95 % interval of the difference of the accuracies, given the number that differ
    high: float  # upper end

    @property
    def difference(self) -> float:
        """Accuracy of the new one minus that of the old one."""
        return (self.gained - self.lost) / self.num_examples

    @property
    def is_worse(self) -> bool:
        """Whether the new one is worse, by more than chance."""
        return self.lost > self.gained and self.p_value < SIGNIFICANCE


def mcnemar(gained: int, lost: int, num_examples: int) -> McNemar:
    """Return the exact test of Q. McNemar, Psychometrika 12 (1947): binomial, given the examples that differ.

    The interval is that of C. Clopper and E. Pearson, Biometrika 26 (1934), for the share of the differing examples
    that are gained, as a difference of accuracies.
    """
    differing, low, high, p_value = gained + lost, 0.0, 0.0, 1.0
    if differing:
        test = stats.binomtest(gained, differing, 0.5)
        share = test.proportion_ci(1 - SIGNIFICANCE, method="exact")
        low, high = ((2 * float(end) - 1) * differing / num_examples for end in (share.low, share.high))
        p_value = float(test.pvalue)
    return McNemar(gained=gained, lost=lost, num_examples=num_examples, p_value=p_value, low=low, high=high)
