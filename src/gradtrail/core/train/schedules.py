"""Learning-rate schedules of Optax. Lengths are fractions of all steps, rates are relative to the peak.

A schedule is a config with `make(peak, num_steps)`, which returns the learning rate as a function of the step, from 0.
"""

import itertools
from collections import Counter
from typing import Annotated, Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike

from gradtrail.core.config import LARGEST, Bounds, Fraction, Positive, PositiveFraction, PositiveShare, Share, config

_AtLeastOne = Annotated[float, Bounds(at_least=1, at_most=LARGEST)]


@config
class Constant:
    """Linear warm-up from 0, then the peak."""

    kind: ClassVar = "constant"
    warmup_fraction: Share

    def make(self, peak: float, num_steps: int) -> optax.Schedule:
        warmup = _steps(self.warmup_fraction, num_steps)
        first = 0.0 if warmup else peak  # without warm-up steps Optax stays at the first value
        return optax.schedules.warmup_constant_schedule(first, peak, warmup)


@config
class Cosine:
    """Cosine decay from the peak (Loshchilov and Hutter, arXiv 1608.03983)."""

    kind: ClassVar = "cosine"
    end_fraction: Fraction

    def make(self, peak: float, num_steps: int) -> optax.Schedule:
        return optax.schedules.cosine_decay_schedule(peak, num_steps, alpha=self.end_fraction)


@config
class WarmupCosine:
    """Linear warm-up from 0, then cosine decay."""

    kind: ClassVar = "warmup_cosine"
    warmup_fraction: Share
    end_fraction: Fraction

    def make(self, peak: float, num_steps: int) -> optax.Schedule:
        warmup = _steps(self.warmup_fraction, num_steps)
        end = peak * self.end_fraction
        return optax.schedules.warmup_cosine_decay_schedule(0.0, peak, warmup, num_steps, end)


@config
class WarmupInverseSqrt:
    """Linear warm-up from 0, then decay with the inverse square root of the step (Vaswani et al., arXiv 1706.03762)."""

    kind: ClassVar = "warmup_inverse_sqrt"
    warmup_fraction: Share

    def make(self, peak: float, num_steps: int) -> optax.Schedule:
        warmup = _steps(self.warmup_fraction, num_steps)

        def rate(step: ArrayLike) -> Array:
            step = jnp.asarray(step, jnp.float32)
            rise = step / warmup if warmup else 1.0
            return peak * jnp.minimum(rise, jnp.sqrt(max(warmup, 1) / jnp.maximum(step, 1.0)))

        return rate


@config
class Linear:
    """Linear decay from the peak."""

    kind: ClassVar = "linear"
    end_fraction: Fraction

    def make(self, peak: float, num_steps: int) -> optax.Schedule:
        return optax.schedules.linear_schedule(peak, peak * self.end_fraction, num_steps)


@config
class Exponential:
    """Exponential decay from the peak."""

    kind: ClassVar = "exponential"
    end_fraction: PositiveFraction

    def make(self, peak: float, num_steps: int) -> optax.Schedule:
        return optax.schedules.exponential_decay(peak, num_steps, self.end_fraction)


@config
class Piecewise:
    """Piecewise constant decay from the peak."""

    kind: ClassVar = "piecewise"
    boundaries: tuple[PositiveShare, ...]  # ends of the pieces, ascending
    factor: Positive  # factor of the rate at each boundary

    def check(self) -> None:
        if any(later <= earlier for earlier, later in itertools.pairwise(self.boundaries)):
            raise ValueError(f"boundaries must rise, got {list(self.boundaries)}")

    def make(self, peak: float, num_steps: int) -> optax.Schedule:
        drops = Counter(max(_steps(boundary, num_steps), 1) for boundary in self.boundaries)  # may coincide
        factors = {step: self.factor**count for step, count in drops.items()}
        return optax.schedules.piecewise_constant_schedule(peak, factors)


@config
class OneCycle:
    """Cosine rise to the peak, then cosine decay (Smith and Topin, arXiv 1708.07120)."""

    kind: ClassVar = "one_cycle"
    warmup_fraction: PositiveShare
    div_factor: _AtLeastOne  # peak over the first rate
    final_div_factor: _AtLeastOne  # first rate over the last one

    def make(self, peak: float, num_steps: int) -> optax.Schedule:
        return optax.schedules.cosine_onecycle_schedule(
            num_steps, peak, self.warmup_fraction, self.div_factor, self.final_div_factor
        )


Schedule: TypeAlias = Constant | Cosine | WarmupCosine | WarmupInverseSqrt | Linear | Exponential | Piecewise | OneCycle


def learning_rate(schedule: Schedule, peak: float, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the optimizer step, from 0, in a training of `num_steps`.

    Optax mixes integers and floats, so it runs under standard dtype promotion whatever the caller has set.
    """
    lenient: Any = jax.numpy_dtype_promotion("standard")
    return lenient(schedule.make(peak, num_steps))


def _steps(fraction: float, num_steps: int) -> int:
    """Round a fraction of the steps to whole steps, and never to all of them."""
    return min(round(fraction * num_steps), num_steps - 1)
