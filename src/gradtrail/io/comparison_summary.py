"""What the runs of a comparison come to: for each variant its figures, and whether it differs more than chance."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradtrail.io.comparison_rows import MadeRun
from gradtrail.io.comparisons import Comparison
from gradtrail.io.significance import LEVEL, Difference, holm, paired_difference

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
    runs: tuple[MadeRun, ...]
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


def summarize(runs: Sequence[MadeRun], comparison: Comparison) -> list[Summary]:
    """Sum up the runs of each variant that has any, in the order of the comparison."""
    baseline = [made for made in runs if made.run.label == comparison.baseline]
    found = [_summarize(label, runs, baseline, comparison) for label in comparison.variants]
    summaries = [summary for summary in found if summary.runs]
    adjusted = holm([summary.p_value for summary in summaries])
    return [replace(summary, p_value=p_value) for summary, p_value in zip(summaries, adjusted, strict=True)]


def _summarize(label: str, runs: Sequence[MadeRun], baseline: Sequence[MadeRun], comparison: Comparison) -> Summary:
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


def _difference(runs: Sequence[MadeRun], baseline: Sequence[MadeRun]) -> Difference | None:
    others = {made.run.seed: made.accuracy for made in baseline}
    pairs = [(made.accuracy, others[made.run.seed]) for made in runs if made.run.seed in others]
    if not pairs:
        return None
    return paired_difference([own for own, _ in pairs], [other for _, other in pairs])


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
