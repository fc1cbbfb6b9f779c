"""From gradients to updates: clipping, then an optimizer of Optax with its own peak learning rate."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from optax import contrib

from gradtrail.core.common.validation import NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, SHARE, check_fields
from gradtrail.core.nn.models import Params
from gradtrail.core.train.muon import muon
from gradtrail.core.train.schedules import ConstantConfig, ScheduleConfig, make_schedule

OptimizerKind = Literal["sgd", "adam", "adamw", "lion", "muon", "schedule_free"]


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent."""

    learning_rate: float  # peak of the schedule
    momentum: float  # decay of the running sum of gradients; 0 for none
    nesterov: bool  # True to look ahead by one step of momentum

    def __post_init__(self) -> None:
        check_fields(self, learning_rate=POSITIVE, momentum=SHARE)


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """Adam (Kingma and Ba, arXiv 1412.6980)."""

    learning_rate: float  # peak of the schedule
    b1: float  # decay of the first moment
    b2: float  # decay of the second moment
    eps: float  # constant added to the root of the second moment

    def __post_init__(self) -> None:
        check_fields(self, learning_rate=POSITIVE, b1=SHARE, b2=SHARE, eps=POSITIVE)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(AdamConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    weight_decay: float  # decay per step, times the learning rate; biases and norms are exempt

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, weight_decay=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class LionConfig:
    """Lion (Chen et al., arXiv 2302.06675), whose learning rate should be 3 to 10 times smaller than that of Adam."""

    learning_rate: float  # peak of the schedule
    b1: float  # weight of the momentum in the update, whose sign is taken
    b2: float  # decay of the momentum
    weight_decay: float  # decay per step, times the learning rate; biases and norms are exempt

    def __post_init__(self) -> None:
        check_fields(self, learning_rate=POSITIVE, b1=SHARE, b2=SHARE, weight_decay=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon (Jordan, kellerjordan.github.io/posts/muon): orthogonalized momentum for kernels, Adam for the rest."""

    learning_rate: float  # peak of the schedule for kernels
    adam_learning_rate: float  # peak of the schedule for biases and norms
    beta: float  # decay of the momentum
    weight_decay: float  # decay per step, times the learning rate; biases and norms are exempt

    def __post_init__(self) -> None:
        check_fields(self, learning_rate=POSITIVE, adam_learning_rate=POSITIVE, beta=SHARE, weight_decay=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeConfig:
    """Schedule-free AdamW: averaging replaces the decay of the rate (Defazio et al., arXiv 2405.15682).

    `schedule` is ignored. Gradients are taken at one point and the average is evaluated, see `evaluation_params`.
    """

    learning_rate: float  # constant rate after the warm-up
    warmup_fraction: float  # share of all steps in which the rate rises linearly from 0
    b1: float  # weight of the average in the point where gradients are taken
    b2: float  # decay of the second moment
    eps: float  # constant added to the root of the second moment
    weight_decay: float  # decay per step, times the learning rate; biases and norms are exempt

    def __post_init__(self) -> None:
        check_fields(
            self,
            learning_rate=POSITIVE,
            warmup_fraction=SHARE,
            b1=POSITIVE_SHARE,
            b2=SHARE,
            eps=POSITIVE,
            weight_decay=NOT_NEGATIVE,
        )


RuleConfig: TypeAlias = SGDConfig | AdamConfig | AdamWConfig | LionConfig | MuonConfig | ScheduleFreeConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Clipping, optimizer and schedule."""

    rule: RuleConfig  # config of the optimizer; its class is the kind
    schedule: ScheduleConfig  # schedule of the learning rate; ignored by schedule-free
    clip_norm: float | None  # global norm to which larger gradients are scaled down; None for no clipping


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the optimizer step, from 0, in a training of `num_steps`."""
    schedule = config.schedule
    if isinstance(config.rule, ScheduleFreeConfig):
        schedule = ConstantConfig(warmup_fraction=config.rule.warmup_fraction)
    return make_schedule(schedule, config.rule.learning_rate, num_steps)


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Return the transformation from gradients to updates: clipping, then the optimizer with its schedule.

    Optax mixes integers and floats, so it runs under standard dtype promotion whatever the caller has set.
    """
    clipping = optax.identity() if config.clip_norm is None else _clipping(config.clip_norm)
    init, update = optax.chain(clipping, _make_rule(config, num_steps))
    lenient = jax.numpy_dtype_promotion("standard")
    return optax.GradientTransformation(lenient(init), lenient(update))


def squared_norm(tree: PyTree[Float[Array, "..."]]) -> Float[Array, ""]:
    """Return the squared global L2 norm, float32.

    XLA's CPU backend sums the squares of a vector in one pass. It writes those of a matrix, or without the barrier, to
    memory and then adds window by window: ten times slower, and an eighth of a small network's step.
    """
    vectors = jax.lax.optimization_barrier([leaf.ravel() for leaf in jax.tree.leaves(tree)])
    wide = (vector.astype(jnp.float32) for vector in vectors)
    return sum((jnp.sum(vector * vector) for vector in wide), start=jnp.float32(0))


def evaluation_params(config: OptimizerConfig, opt_state: PyTree, params: Params) -> Params:
    """Return the parameters to evaluate: the average of schedule-free, else `params`."""
    if isinstance(config.rule, ScheduleFreeConfig):
        with jax.numpy_dtype_promotion("standard"):
            averaged: Params = contrib.schedule_free_eval_params(opt_state[-1], params)
        return averaged
    return params


def _make_rule(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    rate = learning_rate(config, num_steps)
    match config.rule:
        case SGDConfig() as rule:
            return optax.sgd(rate, momentum=rule.momentum or None, nesterov=rule.nesterov)
        case AdamWConfig() as rule:
            return optax.adamw(
                rate, b1=rule.b1, b2=rule.b2, eps=rule.eps, weight_decay=rule.weight_decay, mask=_is_kernel
            )
        case AdamConfig() as rule:
            return optax.adam(rate, b1=rule.b1, b2=rule.b2, eps=rule.eps)
        case LionConfig() as rule:
            return optax.lion(rate, b1=rule.b1, b2=rule.b2, weight_decay=rule.weight_decay, mask=_is_kernel)
        case MuonConfig() as rule:
            adam_rate = make_schedule(config.schedule, rule.adam_learning_rate, num_steps)
            return muon(rate, adam_rate, beta=rule.beta, weight_decay=rule.weight_decay)
        case ScheduleFreeConfig() as rule:
            base = optax.adamw(rate, b1=0.0, b2=rule.b2, eps=rule.eps, weight_decay=rule.weight_decay, mask=_is_kernel)
            return contrib.schedule_free(base, rate, b1=rule.b1)


def _clipping(limit: float) -> optax.GradientTransformation:
    """Scale gradients down to a global norm of `limit`, as `optax.clip_by_global_norm` does, which has a slow norm."""

    def clipped(grads: Params, _: Params | None) -> Params:
        norm = jnp.sqrt(squared_norm(grads))
        factor = jnp.where(norm > limit, limit / norm, 1.0)
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), grads)

    return optax.stateless(clipped)


def _is_kernel(params: Params) -> PyTree[bool]:
    """Return the mask of weight decay, which exempts biases and norms."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
