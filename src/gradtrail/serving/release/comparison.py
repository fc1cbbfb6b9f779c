"""Whether a model is worse than the champion: on the same test examples, and over the seeds of its members."""

from dataclasses import dataclass

import numpy as np

from gradtrail.serving.candidate import Candidate
from gradtrail.support.errors import UserError
from gradtrail.support.significance import Difference, McNemar, mcnemar, paired_difference, unpaired_difference


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model and the champion.

    Attributes:
        examples: on the same test examples.
        seeds: over the accuracies of their members; None where one of them has a single network.
        is_paired: whether the members are paired by equal seeds.
    """

    examples: McNemar
    seeds: Difference | None
    is_paired: bool

    @property
    def worse(self) -> list[str]:
        """How the model is worse, a sentence for each test that says so."""
        said = []
        if self.examples.is_worse:
            said.append(f"worse than the champion on the test split: {self.examples_in_words}")
        if self.seeds is not None and self.seeds.high < 0:
            said.append(f"worse than the champion over its seeds: {self.format_seeds}")
        return said

    @property
    def examples_in_words(self) -> str:
        """Difference of the accuracies with its interval, and the test."""
        found = self.examples
        points = f"{_points(found.difference)} [{_points(found.low)}, {_points(found.high)}] points of accuracy"
        counts = f"{found.gained} gained, {found.lost} lost of {found.num_examples:,}"
        return f"{points}, exact McNemar p = {found.p_value:.3g} ({counts})"

    @property
    def format_seeds(self) -> str:
        """Mean difference of the members' accuracies with its interval, and the test."""
        if (found := self.seeds) is None:
            return "not compared: one of them has a single network"
        test = "paired t-test" if self.is_paired else "Welch's t-test"
        ends = f"[{_points(found.low)}, {_points(found.high)}]" if found.has_interval else "[no interval]"
        return f"{_points(found.mean)} {ends} points of accuracy, {test} p = {found.p_value:.3g}"


def compare(candidate: Candidate, champion: Candidate) -> Comparison:
    """Compare a model with the champion.

    Members with equal seeds are compared in pairs where both have at least two of them: they start from the same
    weights and see the same order of examples. Others are compared by Welch's test.

    Raises:
        UserError: predictions are missing, or the two test splits are not the same; one line.
    """
    own, others = candidate.predictions, champion.predictions
    for who, said in (("the model", own), ("the champion", others)):
        if said is None:
            raise UserError(
                f"{who} has no predictions of the test split here; `dvc repro evaluate` or `dvc pull dvc.yaml`"
            )
    assert own is not None  # noqa: S101 - as checked
    assert others is not None  # noqa: S101
    if (pairs := own.paired_with(others)) is None:
        raise UserError(
            f"the test splits differ: {own.dataset} and {others.dataset}, "
            f"{len(own.table):,} and {len(others.table):,} examples; equal ones are needed to compare"
        )
    labels, predicted, by_champion = pairs
    hits, champions_hits = predicted == labels, by_champion == labels
    gained, lost = int(np.sum(hits & ~champions_hits)), int(np.sum(~hits & champions_hits))
    seeds, is_paired = _over_seeds(candidate.accuracies, champion.accuracies)
    return Comparison(examples=mcnemar(gained, lost, len(labels)), seeds=seeds, is_paired=is_paired)


def _over_seeds(own: dict[int, float], others: dict[int, float]) -> tuple[Difference | None, bool]:
    if min(len(own), len(others)) < 2:
        return None, False
    common = sorted(own.keys() & others.keys())
    if len(common) > 1:
        return paired_difference([own[seed] for seed in common], [others[seed] for seed in common]), True
    return unpaired_difference([*own.values()], [*others.values()]), False


def _points(share: float) -> str:
    return f"{100 * share:+.2f}"
