"""The trainings of an audit: on the given labels, and on copies with planted wrong labels, to measure the scores."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from gradtrail.core.audit.config import AuditConfig
from gradtrail.core.audit.ensemble import CrossValidation, OutOfFoldLogits, cross_validate, num_visits
from gradtrail.core.audit.noise import draw_confused, draw_uniform, plant
from gradtrail.core.audit.scores import probabilities
from gradtrail.core.audit.streams import Stream, stream
from gradtrail.core.data import Split

NoiseKind = Literal["uniform", "confused"]
KINDS: tuple[NoiseKind, ...] = ("uniform", "confused")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A copy of the training labels with wrong ones among them, and logits of networks trained on it."""

    label_set: int  # number of this set of labels; 0 are the given ones
    labels: Int[np.ndarray, " examples"]  # labels with planted ones, int32
    is_wrong: Bool[np.ndarray, " examples"]  # True if the label differs from the given one
    out_of_fold: OutOfFoldLogits  # logits by networks trained on these labels


def num_audit_visits(splits: Mapping[str, Split], config: AuditConfig) -> int:
    """Return the number of examples that all networks of an audit train on and evaluate."""
    other_splits = {name: split for name, split in splits.items() if name != "train"}
    return num_visits(splits["train"], other_splits, config) + len(KINDS) * num_visits(splits["train"], {}, config)


def cross_validate_all(
    networks: CrossValidation,
    splits: Mapping[str, Split],
    config: AuditConfig,
    *,
    steps_per_call: int,
    advance: Callable[..., object],
) -> tuple[dict[str, OutOfFoldLogits], dict[NoiseKind, Planted]]:
    """Return out-of-fold logits of each split with its given labels, and of the training split with planted ones.

    A planted label differs from the given one, which counts as correct. `uniform`: each other class is equally
    likely. `confused`: as likely as the networks trained on the given labels find it. Either way the examples are
    chosen at random. Arguments are those of `ensemble.cross_validate`.
    """
    train = splits["train"]
    other_splits = {name: split for name, split in splits.items() if name != "train"}

    def logits_for(labels: np.ndarray, other_splits: Mapping[str, Split], label_set: int) -> dict[str, OutOfFoldLogits]:
        relabelled = dataclasses.replace(train, labels=labels)
        options: dict[str, Any] = {"steps_per_call": steps_per_call, "advance": advance}
        return cross_validate(networks, relabelled, other_splits, config, label_set=label_set, **options)

    judged = logits_for(train.labels, other_splits, 0)
    mean = probabilities(judged["train"].logits, 1.0).mean(axis=0)
    planted: dict[NoiseKind, Planted] = {}
    for label_set, kind in enumerate(KINDS, start=1):
        seed = stream(config.seed, Stream.PLANTED_LABELS, label_set)
        is_uniform = kind == "uniform"
        wrong = (
            draw_uniform(train.labels, networks.num_classes, seed=seed)
            if is_uniform
            else draw_confused(mean, train.labels, seed=seed)
        )
        places = stream(config.seed, Stream.PLANTED_PLACES, label_set)
        labels = plant(train.labels, wrong, config.noise_rate, seed=places)
        out_of_fold = logits_for(labels, {}, label_set)["train"]
        is_wrong = labels != train.labels
        planted[kind] = Planted(label_set=label_set, labels=labels, is_wrong=is_wrong, out_of_fold=out_of_fold)
    return judged, planted
