"""The audit's trainings: on the given labels, and on copies with wrong labels planted, to measure what finds them."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from gradtrail.core.audit.config import AuditConfig
from gradtrail.core.audit.ensemble import Judgement, Judges, judge, num_visits
from gradtrail.core.audit.noise import draw_confused, draw_uniform, plant
from gradtrail.core.audit.scores import probabilities
from gradtrail.core.audit.streams import Stream, stream
from gradtrail.core.common.split import Split

NoiseKind = Literal["uniform", "confused"]
KINDS: tuple[NoiseKind, ...] = ("uniform", "confused")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A copy of the training labels with wrong ones among them, and what networks trained on it say.

    Attributes:
        labelling: number of this set of labels; the given ones are 0.
        labels: int32.
        is_wrong: where they differ from the given ones.
        judgement: by as many networks as judge the given labels.
    """

    labelling: int
    labels: Int[np.ndarray, " examples"]
    is_wrong: Bool[np.ndarray, " examples"]
    judgement: Judgement


def num_visits_of_audit(splits: Mapping[str, Split], config: AuditConfig) -> int:
    """Return how many examples all networks of an audit train on and judge."""
    others = {name: split for name, split in splits.items() if name != "train"}
    return num_visits(splits["train"], others, config) + len(KINDS) * num_visits(splits["train"], {}, config)


def judge_all(
    judges: Judges,
    splits: Mapping[str, Split],
    config: AuditConfig,
    *,
    steps_per_call: int,
    advance: Callable[..., object],
) -> tuple[dict[str, Judgement], dict[NoiseKind, Planted]]:
    """Return the judgements of each split with its given labels, and of the training split with planted ones.

    A planted label is another than the given one, which counts as correct. `uniform`: each other class is equally
    likely. `confused`: as likely as the networks trained on the given labels find it. Either way the examples are
    chosen at random. Arguments are those of `ensemble.judge`.
    """
    train = splits["train"]
    others = {name: split for name, split in splits.items() if name != "train"}

    def judge_labels(labels: np.ndarray, others: Mapping[str, Split], labelling: int) -> dict[str, Judgement]:
        with_labels = dataclasses.replace(train, labels=labels)
        options: dict[str, Any] = {"steps_per_call": steps_per_call, "advance": advance}
        return judge(judges, with_labels, others, config, labelling=labelling, **options)

    given = judge_labels(train.labels, others, 0)
    mean = probabilities(given["train"].logits, 1.0).mean(axis=0)
    planted: dict[NoiseKind, Planted] = {}
    for labelling, kind in enumerate(KINDS, start=1):
        seed = stream(config.seed, Stream.PLANTED_LABELS, labelling)
        is_uniform = kind == "uniform"
        wrong = (
            draw_uniform(train.labels, judges.num_classes, seed=seed)
            if is_uniform
            else draw_confused(mean, train.labels, seed=seed)
        )
        places = stream(config.seed, Stream.PLANTED_PLACES, labelling)
        labels = plant(train.labels, wrong, config.noise_rate, seed=places)
        judgement = judge_labels(labels, {}, labelling)["train"]
        is_wrong = labels != train.labels
        planted[kind] = Planted(labelling=labelling, labels=labels, is_wrong=is_wrong, judgement=judgement)
    return given, planted
