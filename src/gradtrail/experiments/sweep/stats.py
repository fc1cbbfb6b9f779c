"""Statistics of a comparison: metrics of each variant, and whether its difference to the baseline is more than chance.

Two trainings with the same seed start from the same weights and see the examples in the same order, so they are
compared in pairs, which removes the effect of the seed. "Chance" refers to the seed only: with another test split the
result may differ.

Sources: Student, "The probable error of a mean", Biometrika 6 (1908); S. Holm, "A simple sequentially rejective
multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from gradtrail.experiments.sweep.runs import CompletedRun
from gradtrail.experiments.sweep.spec import Comparison

LEVEL = 0.05
_EQUAL = 1e-9  # metrics are stored with 9 digits, so values closer than this are equal


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of paired differences.

    Attributes:
        mean: mean over all pairs.
        low: lower end of the 95 % confidence interval; NaN where there is none.
        high: upper end; NaN likewise.
        p_value: for the hypothesis that there is no difference; NaN with a single pair.
        num_pairs: at least 1.
    """

    mean: float
    low: float
    high: float
    p_value: float
    num_pairs: int


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % confidence interval, which are NaN for a single value.

    `mean ± t · s / √n`, with the sample's standard deviation s and the quantile t of Student's distribution with n − 1
    degrees of freedom.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(1 - LEVEL / 2, len(values) - 1)) * _standard_error(values)
    return mean, mean - half, mean + half


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Compare values in pairs by Student's t-test, two-sided: `t = d̄ / (s_d / √n)`, n − 1 degrees of freedom.

    Where all differences are the same number, their spread is 0 and the t-test is undefined. If the number is 0, p = 1
    and the interval is 0. Otherwise the exact sign test is used, which needs no spread: n equal signs have
    p = 2 · 2⁻ⁿ, and there is no interval.

    Args:
        values: at least one.
        baseline: of the same length; values at the same index are a pair.
    """
    differences = np.subtract(values, baseline)
    count = len(differences)
    mean, low, high = mean_interval(differences.tolist())
    if count < 2:
        p_value = math.nan
    elif np.ptp(differences) > _EQUAL:
        p_value = 2 * float(stats.t.sf(abs(mean) / _standard_error(differences.tolist()), count - 1))
    elif abs(mean) <= _EQUAL:
        mean, low, high, p_value = 0.0, 0.0, 0.0, 1.0
    else:
        low, high, p_value = math.nan, math.nan, 2.0 ** (1 - count)
    return Difference(mean=mean, low=low, high=high, p_value=p_value, num_pairs=count)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p values of m tests, so that the chance of even one false alarm stays below the level.

    The k-th smallest, from 1, becomes `max over j ≤ k of min(1, (m − j + 1) · p_j)`. NaN, for a test that was not
    possible, does not count and stays NaN.
    """
    adjusted = list(p_values)
    known = sorted((p_value, place) for place, p_value in enumerate(p_values) if not math.isnan(p_value))
    highest = 0.0
    for rank, (p_value, place) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p_value))
        adjusted[place] = highest
    return adjusted


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


MORE, NO_MORE = "more than chance", "no more than chance"
_ONE_SEED, _NO_SEED = "unknown: one seed", "unknown: no seed in common"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a variant.

    Attributes:
        runs: at least one, ordered by seed.
        is_baseline: whether the other variants are compared with this one.
        difference: difference of the accuracies to the baseline, over the seeds that both have; None if there are none.
        p_value: p value of the difference, adjusted for the number of variants; NaN where it is unknown.
        time_ratio: training time divided by the baseline's; None unless both were timed.
    """

    label: str
    runs: tuple[CompletedRun, ...]
    is_baseline: bool
    difference: Difference | None
    p_value: float
    time_ratio: float | None

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
        """Whether the difference is more than chance, as text."""
        if self.is_baseline:
            return "baseline"
        if math.isnan(self.p_value):
            return _ONE_SEED if self.difference else _NO_SEED
        return MORE if self.p_value <= LEVEL else NO_MORE


def summarize(runs: Sequence[CompletedRun], comparison: Comparison) -> list[Summary]:
    """Summarize the runs of each variant that has any, in the order of the comparison."""
    baseline = [run for run in runs if run.planned.label == comparison.baseline]
    found = [_summarize(label, runs, baseline, comparison) for label in comparison.variants]
    summaries = [summary for summary in found if summary.runs]
    adjusted = holm([summary.p_value for summary in summaries])
    return [replace(summary, p_value=p_value) for summary, p_value in zip(summaries, adjusted, strict=True)]


def _summarize(
    label: str, runs: Sequence[CompletedRun], baseline: Sequence[CompletedRun], comparison: Comparison
) -> Summary:
    own = sorted((run for run in runs if run.planned.label == label), key=lambda run: run.planned.seed)
    is_baseline = label == comparison.baseline
    difference = None if is_baseline else _difference(own, baseline)
    times = _median([run.seconds for run in own]), _median([run.seconds for run in baseline])
    return Summary(
        label=label,
        runs=tuple(own),
        is_baseline=is_baseline,
        difference=difference,
        p_value=difference.p_value if difference else math.nan,
        time_ratio=times[0] / times[1] if times[0] and times[1] else None,
    )


def _difference(runs: Sequence[CompletedRun], baseline: Sequence[CompletedRun]) -> Difference | None:
    others = {run.planned.seed: run.accuracy for run in baseline}
    pairs = [(run.accuracy, others[run.planned.seed]) for run in runs if run.planned.seed in others]
    if not pairs:
        return None
    return paired_difference([own for own, _ in pairs], [other for _, other in pairs])


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
