"""Learning-rate schedules, from Optax. Lengths are shares of the training, rates are shares of the highest one."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import optax

from gradtrail.core.common.validation import check

ScheduleKind = Literal["constant", "cosine", "warmup_cosine", "linear", "exponential", "piecewise", "one_cycle"]


@dataclass(frozen=True, kw_only=True)
class ConstantConfig:
    """The highest rate throughout, after a linear rise from 0.

    Attributes:
        warmup_fraction: share of all steps that rise.
    """

    warmup_fraction: float

    def __post_init__(self) -> None:
        check("warmup_fraction", self.warmup_fraction, at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """Half a cosine down (Loshchilov and Hutter, arXiv 1608.03983).

    Attributes:
        end_fraction: last value as a share of the highest.
    """

    end_fraction: float

    def __post_init__(self) -> None:
        check("end_fraction", self.end_fraction, at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class WarmupCosineConfig:
    """Linear rise from 0, then half a cosine down.

    Attributes:
        warmup_fraction: share of all steps that rise.
        end_fraction: last value as a share of the highest.
    """

    warmup_fraction: float
    end_fraction: float

    def __post_init__(self) -> None:
        check("warmup_fraction", self.warmup_fraction, at_least=0, below=1)
        check("end_fraction", self.end_fraction, at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """A straight line down.

    Attributes:
        end_fraction: last value as a share of the highest.
    """

    end_fraction: float

    def __post_init__(self) -> None:
        check("end_fraction", self.end_fraction, at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class ExponentialConfig:
    """The same factor down in every step.

    Attributes:
        end_fraction: last value as a share of the highest.
    """

    end_fraction: float

    def __post_init__(self) -> None:
        check("end_fraction", self.end_fraction, above=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class PiecewiseConfig:
    """Constant between drops.

    Attributes:
        boundaries: where the drops are, as shares of all steps, rising.
        factor: what each drop leaves of the rate.
    """

    boundaries: tuple[float, ...]
    factor: float

    def __post_init__(self) -> None:
        for boundary in self.boundaries:
            check("boundaries", boundary, above=0, below=1)
        if any(later <= earlier for earlier, later in itertools.pairwise(self.boundaries)):
            raise ValueError(f"boundaries must rise, got {list(self.boundaries)}")
        check("factor", self.factor, above=0)


@dataclass(frozen=True, kw_only=True)
class OneCycleConfig:
    """Up and down by half a cosine each (Smith and Topin, arXiv 1708.07120).

    Attributes:
        warmup_fraction: share of all steps that rise.
        div_factor: highest rate over the first one.
        final_div_factor: first rate over the last one.
    """

    warmup_fraction: float
    div_factor: float
    final_div_factor: float

    def __post_init__(self) -> None:
        check("warmup_fraction", self.warmup_fraction, above=0, below=1)
        check("div_factor", self.div_factor, at_least=1)
        check("final_div_factor", self.final_div_factor, at_least=1)


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
    """Return the learning rate as a function of the optimizer step, counted from 0.

    Args:
        config: its class is the kind of schedule.
        peak: the highest rate.
        num_steps: length of the whole training.

    Returns:
        int step → float32 rate. Works under strict dtype promotion too, which Optax itself does not.
    """
    return jax.numpy_dtype_promotion("standard")(_make_schedule(config, peak, num_steps))


def _make_schedule(config: ScheduleConfig, peak: float, num_steps: int) -> optax.Schedule:
    match config:
        case ConstantConfig():
            warmup = _steps(config.warmup_fraction, num_steps)
            first = 0.0 if warmup else peak  # Optax stays at the first value where the rise has no steps
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
    """Return a share of the steps in whole ones, but never all of them."""
    return min(round(fraction * num_steps), num_steps - 1)
