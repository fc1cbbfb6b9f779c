"""Tests whether a model is worse than the champion: on the same test examples, and over the seeds of its members."""

from dataclasses import dataclass

import numpy as np

from gradtrail.serving.candidate import Candidate, Predictions
from gradtrail.support.errors import UserError
from gradtrail.support.significance import Difference, McNemar, mcnemar, paired_difference, unpaired_difference


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model compared with the champion."""

    examples: McNemar  # test over the same test examples
    seeds: Difference | None  # test over the accuracies of the members; None if one of the two has a single network
    is_paired: bool  # whether the members are paired by equal seeds

    @property
    def worse(self) -> list[str]:
        """Reasons why the model is worse, one for each test that shows it."""
        reasons = []
        if self.examples.is_worse:
            reasons.append(f"worse than the champion on the test split: {self.examples_in_words}")
        if self.seeds is not None and self.seeds.high < 0:
            reasons.append(f"worse than the champion over its seeds: {self.seeds_in_words}")
        return reasons

    @property
    def examples_in_words(self) -> str:
        """Difference of the accuracies with its interval, and the test."""
        test = self.examples
        points = f"{_points(test.difference)} [{_points(test.low)}, {_points(test.high)}] points of accuracy"
        counts = f"{test.gained} gained, {test.lost} lost of {test.num_examples:,}"
        return f"{points}, exact McNemar p = {test.p_value:.3g} ({counts})"

    @property
    def seeds_in_words(self) -> str:
        """Mean difference of the members' accuracies with its interval, and the test."""
        if (difference := self.seeds) is None:
            return "not compared: one of the two has a single network"
        test = "paired t-test" if self.is_paired else "Welch's t-test"
        has_interval = difference.has_interval
        ends = f"[{_points(difference.low)}, {_points(difference.high)}]" if has_interval else "[no interval]"
        return f"{_points(difference.mean)} {ends} points of accuracy, {test} p = {difference.p_value:.3g}"


def compare(candidate: Candidate, champion: Candidate) -> Comparison:
    """Compare a model with the champion.

    Members with equal seeds are compared in pairs if there are at least two of them: they start from the same weights
    and get the same order of examples. Other members are compared by Welch's test.

    Raises:
        UserError: Predictions are missing, or the two test splits differ; one line.
    """
    first, second = _predictions("the model", candidate), _predictions("the champion", champion)
    if (pairs := first.paired_with(second)) is None:
        raise UserError(
            f"the test splits differ: {first.dataset} and {second.dataset}, "
            f"{len(first.table):,} and {len(second.table):,} examples; equal ones are needed to compare"
        )
    labels, first_labels, second_labels = pairs
    first_hits, second_hits = first_labels == labels, second_labels == labels
    gained, lost = int(np.sum(first_hits & ~second_hits)), int(np.sum(~first_hits & second_hits))
    seeds, is_paired = _over_seeds(candidate.accuracies, champion.accuracies)
    return Comparison(examples=mcnemar(gained, lost, len(labels)), seeds=seeds, is_paired=is_paired)


def _predictions(role: str, candidate: Candidate) -> Predictions:
    if candidate.predictions is None:
        remedy = "`dvc repro evaluate` or `dvc pull dvc.yaml`"
        raise UserError(f"{role} has no predictions of the test split here; {remedy}")
    return candidate.predictions


def _over_seeds(first: dict[int, float], second: dict[int, float]) -> tuple[Difference | None, bool]:
    if min(len(first), len(second)) < 2:
        return None, False
    common = sorted(first.keys() & second.keys())
    if len(common) > 1:
        return paired_difference([first[seed] for seed in common], [second[seed] for seed in common]), True
    return unpaired_difference([*first.values()], [*second.values()]), False


def _points(share: float) -> str:
    return f"{100 * share:+.2f}"
