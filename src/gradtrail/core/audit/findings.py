"""Findings of an audit: a score, a proposal and a probability of being wrong for every label; NumPy on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.audit.calibration import confident_rate, density_ratio, positions, probability_wrong
from gradtrail.core.audit.ensemble import OutOfFoldLogits
from gradtrail.core.audit.noise import Seed, draw_confused, draw_uniform
from gradtrail.core.audit.planting import NoiseKind, Planted
from gradtrail.core.audit.scores import fit_temperature, label_scores, probabilities
from gradtrail.core.audit.streams import Stream, stream
from gradtrail.core.intervals import Interval


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings of an audit in one split; a row for each example."""

    scores: Mapping[str, Float[np.ndarray, " examples"]]  # scores by name; a larger one is more suspicious
    proposed: Int[np.ndarray, " examples"]  # the most probable class, int32
    proposed_probability: Float[np.ndarray, " examples"]  # mean probability of that class at the fitted temperature
    probability_wrong: Float[np.ndarray, " examples"]  # probability that the given label is wrong
    rate: Interval  # share of wrong labels in the split


def find(
    judged: Mapping[str, OutOfFoldLogits],
    labels: Mapping[str, Int[np.ndarray, " examples"]],
    chosen: str,
    *,
    seed: int,
    label_set: int = 0,
) -> dict[str, Findings]:
    """Return the findings about the labels of each split.

    The temperature, and the ratio of densities behind `probability_wrong`, are those of the training split; of another
    split only the share of wrong labels is estimated.

    Args:
        judged: out-of-fold logits by split; `train` is the first.
        labels: given class of each example of each split.
        chosen: name of the score that `probability_wrong` follows from.
        seed: seed of the wrong labels that are drawn for comparison.
        label_set: number of the set of labels, 0 for the given ones; each set has its own random numbers.
    """
    temperature = fit_temperature(judged["train"].logits, labels["train"])
    findings: dict[str, Findings] = {}
    ratio: np.ndarray | None = None
    for place, (name, out_of_fold) in enumerate(judged.items()):
        scores = label_scores(out_of_fold.logits, labels[name], temperature)
        mean = probabilities(out_of_fold.logits, temperature).mean(axis=0)
        seeds = [stream(seed, Stream.COMPARED_LABELS, label_set, place, kind) for kind in range(2)]
        wrong = _wrong_scores(out_of_fold, mean, labels[name], temperature, chosen, seeds)
        places = positions(scores[chosen], wrong)
        ratio = density_ratio(places) if ratio is None else ratio
        rate = confident_rate(mean, labels[name])
        findings[name] = Findings(
            scores={**scores, "grad_norm": out_of_fold.grad_norm},
            proposed=np.argmax(mean, axis=1).astype(np.int32),
            proposed_probability=mean.max(axis=1),
            probability_wrong=probability_wrong(places, ratio, rate.value),
            rate=rate,
        )
    return findings


def find_planted(planted: Mapping[NoiseKind, Planted], chosen: str, *, seed: int) -> dict[NoiseKind, Findings]:
    """Return the findings on planted labels, to compare them with the truth, which they do not use."""
    return {
        kind: find({"train": copy.out_of_fold}, {"train": copy.labels}, chosen, seed=seed, label_set=copy.label_set)[
            "train"
        ]
        for kind, copy in planted.items()
    }


def _wrong_scores(
    out_of_fold: OutOfFoldLogits,
    mean: Float[np.ndarray, "examples classes"],
    labels: Int[np.ndarray, " examples"],
    temperature: float,
    chosen: str,
    seeds: Sequence[Seed],
) -> Float[np.ndarray, " planted"]:
    """Return the scores of two wrong labels for each example whose given label is the prediction, one of each kind."""
    agreed = np.flatnonzero(np.argmax(mean, axis=1) == labels)
    logits, correct = out_of_fold.logits[:, agreed], labels[agreed]
    drawn = (
        draw_uniform(correct, mean.shape[1], seed=seeds[0]),
        draw_confused(mean[agreed], correct, seed=seeds[1]),
    )
    return np.concatenate([label_scores(logits, wrong, temperature)[chosen] for wrong in drawn])
