"""Learning-rate schedules of Optax. Lengths are shares of all steps, rates are relative to the peak."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import optax

from gradtrail.core.common.validation import AT_LEAST_ONE, POSITIVE, POSITIVE_SHARE, SHARE, check_fields

ScheduleKind = Literal["constant", "cosine", "warmup_cosine", "linear", "exponential", "piecewise", "one_cycle"]


@dataclass(frozen=True, kw_only=True)
class ConstantConfig:
    """Linear rise from 0 to the peak, then constant."""

    warmup_fraction: float  # share of all steps in which the rate rises

    def __post_init__(self) -> None:
        check_fields(self, warmup_fraction=SHARE)


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """Cosine decay from the peak (Loshchilov and Hutter, arXiv 1608.03983)."""

    end_fraction: float  # last value over the peak

    def __post_init__(self) -> None:
        check_fields(self, end_fraction={"at_least": 0, "at_most": 1})


@dataclass(frozen=True, kw_only=True)
class WarmupCosineConfig:
    """Linear rise from 0 to the peak, then cosine decay."""

    warmup_fraction: float  # share of all steps in which the rate rises
    end_fraction: float  # last value over the peak

    def __post_init__(self) -> None:
        check_fields(self, warmup_fraction=SHARE, end_fraction={"at_least": 0, "at_most": 1})


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """Linear decay from the peak."""

    end_fraction: float  # last value over the peak

    def __post_init__(self) -> None:
        check_fields(self, end_fraction={"at_least": 0, "at_most": 1})


@dataclass(frozen=True, kw_only=True)
class ExponentialConfig:
    """Exponential decay from the peak."""

    end_fraction: float  # last value over the peak

    def __post_init__(self) -> None:
        check_fields(self, end_fraction={"above": 0, "at_most": 1})


@dataclass(frozen=True, kw_only=True)
class PiecewiseConfig:
    """Piecewise constant decay from the peak."""

    boundaries: tuple[float, ...]  # ends of the pieces, as shares of all steps, ascending
    factor: float  # factor of the rate at each boundary

    def __post_init__(self) -> None:
        check_fields(self, boundaries=POSITIVE_SHARE)
        if any(later <= earlier for earlier, later in itertools.pairwise(self.boundaries)):
            raise ValueError(f"boundaries must rise, got {list(self.boundaries)}")
        check_fields(self, factor=POSITIVE)


@dataclass(frozen=True, kw_only=True)
class OneCycleConfig:
    """One cycle: cosine rise to the peak, then cosine decay (Smith and Topin, arXiv 1708.07120)."""

    warmup_fraction: float  # share of all steps in which the rate rises
    div_factor: float  # peak over the first rate
    final_div_factor: float  # first rate over the last one

    def __post_init__(self) -> None:
        check_fields(self, warmup_fraction=POSITIVE_SHARE, div_factor=AT_LEAST_ONE, final_div_factor=AT_LEAST_ONE)


ScheduleConfig: TypeAlias = (
    ConstantConfig
    | CosineConfig
    | WarmupCosineConfig
    | LinearConfig
    | ExponentialConfig
    | PiecewiseConfig
    | OneCycleConfig
)


def make_schedule(config: ScheduleConfig, peak: float, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the optimizer step, from 0.

    Optax mixes integers and floats, so it runs under standard dtype promotion whatever the caller has set.

    Args:
        config: config of the schedule; its class is the kind.
        num_steps: length of the whole training.
    """
    return jax.numpy_dtype_promotion("standard")(_make_schedule(config, peak, num_steps))


def _make_schedule(config: ScheduleConfig, peak: float, num_steps: int) -> optax.Schedule:
    match config:
        case ConstantConfig():
            warmup = _steps(config.warmup_fraction, num_steps)
            first = 0.0 if warmup else peak  # without warm-up steps Optax stays at the first value
            return optax.schedules.warmup_constant_schedule(first, peak, warmup)
        case CosineConfig():
            return optax.schedules.cosine_decay_schedule(peak, num_steps, alpha=config.end_fraction)
        case WarmupCosineConfig():
            warmup = _steps(config.warmup_fraction, num_steps)
            end = peak * config.end_fraction
            return optax.schedules.warmup_cosine_decay_schedule(0.0, peak, warmup, num_steps, end)
        case LinearConfig():
            return optax.schedules.linear_schedule(peak, peak * config.end_fraction, num_steps)
        case ExponentialConfig():
            return optax.schedules.exponential_decay(peak, num_steps, config.end_fraction)
        case PiecewiseConfig():
            drops = Counter(max(_steps(boundary, num_steps), 1) for boundary in config.boundaries)  # may coincide
            factors = {step: config.factor**count for step, count in drops.items()}
            return optax.schedules.piecewise_constant_schedule(peak, factors)
        case OneCycleConfig():
            return optax.schedules.cosine_onecycle_schedule(
                num_steps, peak, config.warmup_fraction, config.div_factor, config.final_div_factor
            )


def _steps(fraction: float, num_steps: int) -> int:
    """Round a share of the steps to whole steps, and never to all of them."""
    return min(round(fraction * num_steps), num_steps - 1)
