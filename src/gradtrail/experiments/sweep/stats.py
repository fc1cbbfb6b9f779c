"""Whether a difference between two ways of training is more than chance: paired tests over seeds, corrected for many.

Two trainings of one seed begin with the same weights and see the examples in the same order, so they are compared in
pairs: what the seed does to both is taken out. Chance means the seed here, and nothing else: another test split, or
another choice of what is held equal, may say otherwise.

Sources: Student, "The probable error of a mean", Biometrika 6 (1908); S. Holm, "A simple sequentially rejective
multiple test procedure", Scandinavian Journal of Statistics 6 (1979).

What the runs of a comparison come to: for each variant its figures, and whether it differs more than chance.
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
_EQUAL = 1e-9  # figures are stored with 9 digits: what lies closer is the same


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of paired differences.

    Attributes:
        mean: of all pairs.
        low: lower end of the 95 % confidence interval; NaN where the pairs do not tell.
        high: upper end.
        p_value: of the hypothesis that there is no difference; NaN with a single pair.
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

    Where all differences are the same number there is no spread to measure chance by. If it is 0, nothing speaks for a
    difference: p = 1, and the interval is 0. If it is not, the exact sign test counts, which needs no spread: n equal
    signs have p = 2 · 2⁻ⁿ; there is no interval.

    Args:
        values: at least one.
        baseline: of the same length; the values of one place make a pair.
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

    The k-th smallest, from 1, becomes `max over j ≤ k of min(1, (m − j + 1) · p_j)`. Tests that were not made, NaN, do
    not count and stay as they are.
    """
    adjusted = list(p_values)
    made = sorted((p_value, place) for place, p_value in enumerate(p_values) if not math.isnan(p_value))
    highest = 0.0
    for rank, (p_value, place) in enumerate(made):
        highest = max(highest, min(1.0, (len(made) - rank) * p_value))
        adjusted[place] = highest
    return adjusted


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


MORE, NO_MORE = "more than chance", "no more than chance"
_ONE_SEED, _NO_SEED = "one seed: cannot say", "no seed in common: cannot say"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A variant.

    Attributes:
        runs: at least one, by seed.
        is_baseline: whether the others are held against this one.
        difference: of the accuracies, to the baseline, over the seeds that both have; None where there are none.
        p_value: of the difference, adjusted for the number of variants; NaN where it cannot be said.
        time_ratio: seconds of training, by the baseline's; None where not both were timed.
    """

    label: str
    runs: tuple[CompletedRun, ...]
    is_baseline: bool
    difference: Difference | None
    p_value: float
    time_ratio: float | None

    @property
    def accuracies(self) -> tuple[float, ...]:
        """On the test split, in the order of the seeds."""
        return tuple(made.accuracy for made in self.runs)

    @property
    def mean(self) -> float:
        """The mean accuracy."""
        return statistics.mean(self.accuracies)

    @property
    def loss(self) -> float:
        """The mean loss on the test split."""
        return statistics.mean(made.loss for made in self.runs)

    @property
    def seconds(self) -> float | None:
        """The median time of the training loop."""
        return _median([made.seconds for made in self.runs])

    @property
    def compile_seconds(self) -> float | None:
        """The median time of compiling."""
        return _median([made.compile_seconds for made in self.runs])

    @property
    def verdict(self) -> str:
        """Whether the difference is more than chance, in words."""
        if self.is_baseline:
            return "baseline"
        if math.isnan(self.p_value):
            return _ONE_SEED if self.difference else _NO_SEED
        return MORE if self.p_value <= LEVEL else NO_MORE


def summarize(runs: Sequence[CompletedRun], comparison: Comparison) -> list[Summary]:
    """Sum up the runs of each variant that has any, in the order of the comparison."""
    baseline = [made for made in runs if made.run.label == comparison.baseline]
    found = [_summarize(label, runs, baseline, comparison) for label in comparison.variants]
    summaries = [summary for summary in found if summary.runs]
    adjusted = holm([summary.p_value for summary in summaries])
    return [replace(summary, p_value=p_value) for summary, p_value in zip(summaries, adjusted, strict=True)]


def _summarize(
    label: str, runs: Sequence[CompletedRun], baseline: Sequence[CompletedRun], comparison: Comparison
) -> Summary:
    own = sorted((made for made in runs if made.run.label == label), key=lambda made: made.run.seed)
    is_baseline = label == comparison.baseline
    difference = None if is_baseline else _difference(own, baseline)
    times = _median([made.seconds for made in own]), _median([made.seconds for made in baseline])
    return Summary(
        label=label,
        runs=tuple(own),
        is_baseline=is_baseline,
        difference=difference,
        p_value=difference.p_value if difference else math.nan,
        time_ratio=times[0] / times[1] if times[0] and times[1] else None,
    )


def _difference(runs: Sequence[CompletedRun], baseline: Sequence[CompletedRun]) -> Difference | None:
    others = {made.run.seed: made.accuracy for made in baseline}
    pairs = [(made.accuracy, others[made.run.seed]) for made in runs if made.run.seed in others]
    if not pairs:
        return None
    return paired_difference([own for own, _ in pairs], [other for _, other in pairs])


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
