"""The optimizer and its learning-rate schedule, from Optax."""

from dataclasses import dataclass
from typing import Literal

import jax
import optax
from jaxtyping import PyTree

from gradtrail.core.bounds import check
from gradtrail.core.models import Params

OptimizerKind = Literal["sgd", "adamw"]
ScheduleKind = Literal["constant", "warmup_cosine"]


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent.

    Attributes:
        momentum: decay of the running sum of gradients; 0 for none.
        nesterov: look ahead by one step of momentum.
    """

    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        check("momentum", self.momentum, at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).

    Attributes:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: per step, times the learning rate; biases are exempt.
    """

    b1: float
    b2: float
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        check("b1", self.b1, at_least=0, below=1)
        check("b2", self.b2, at_least=0, below=1)
        check("eps", self.eps, above=0)
        check("weight_decay", self.weight_decay, at_least=0)


@dataclass(frozen=True, kw_only=True)
class WarmupCosineConfig:
    """Linear rise from 0 to the learning rate, then half a cosine down (Loshchilov and Hutter, arXiv 1608.03983).

    Attributes:
        warmup_fraction: share of all steps that rise.
        end_fraction: last value as a share of the learning rate.
    """

    warmup_fraction: float
    end_fraction: float

    def __post_init__(self) -> None:
        check("warmup_fraction", self.warmup_fraction, at_least=0, below=1)
        check("end_fraction", self.end_fraction, at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates.

    Attributes:
        learning_rate: the highest one that the schedule reaches.
        clip_norm: gradients with a larger global norm are scaled down to it; null for no clipping.
    """

    kind: OptimizerKind
    sgd: SGDConfig
    adamw: AdamWConfig
    schedule: ScheduleKind
    warmup_cosine: WarmupCosineConfig
    learning_rate: float
    clip_norm: float | None


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the optimizer step, counted from 0.

    Args:
        config: names the kind of schedule.
        num_steps: length of the whole training.
    """
    if config.schedule == "constant":
        return optax.schedules.constant_schedule(config.learning_rate)
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(round(config.warmup_cosine.warmup_fraction * num_steps), num_steps - 1),
        decay_steps=num_steps,
        end_value=config.learning_rate * config.warmup_cosine.end_fraction,
    )


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return the transformation from gradients to updates: clipping, then the optimizer under the schedule."""
    clipping = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clipping, _make_update_rule(config, schedule))


def _make_update_rule(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    if config.kind == "sgd":
        return optax.sgd(schedule, momentum=config.sgd.momentum or None, nesterov=config.sgd.nesterov)
    adamw = config.adamw
    return optax.adamw(
        schedule, b1=adamw.b1, b2=adamw.b2, eps=adamw.eps, weight_decay=adamw.weight_decay, mask=_is_matrix
    )


def _is_matrix(params: Params) -> PyTree[bool]:
    """Weight decay pulls on weights, not on biases."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
