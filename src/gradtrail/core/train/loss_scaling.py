"""Dynamic loss scaling: keeps small float16 cotangents from underflow (Micikevicius et al., arXiv 1710.03740).

The loss is multiplied by a scale and the gradients are divided by it. A step whose gradients are not finite is skipped
and lowers the scale; enough finite steps in a row raise it.
"""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from gradtrail.core.config import LARGEST, Bounds, Count, Positive, PositiveShare, config


@config
class LossScalingConfig:
    """Initial value and changes of the scale; used with `precision: float16` only."""

    initial: Annotated[float, Bounds(above=0, at_most=2.0**127)]  # scale of the first step
    growth_factor: Annotated[float, Bounds(above=1, at_most=LARGEST)]  # after `growth_interval` finite steps in a row
    backoff_factor: PositiveShare  # factor of the scale after a step that is not finite
    growth_interval: Count
    minimum: Positive  # lower bound of the scale

    def check(self) -> None:
        Bounds(at_least=self.minimum, at_most=2.0**127).check("initial", self.initial)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale, and the counters that decide its next value."""

    scale: Float[Array, ""]  # factor of the loss, float32
    finite_steps: Int[Array, ""]  # number of finite steps in a row since the scale last changed, int32
    skipped_steps: Int[Array, ""]  # number of skipped steps since the beginning, int32


def initial_scale(config: LossScalingConfig) -> LossScale:
    """Return the scale before the first step."""
    return LossScale(scale=jnp.float32(config.initial), finite_steps=jnp.int32(0), skipped_steps=jnp.int32(0))


def all_finite(tree: PyTree[Float[Array, "..."]]) -> Bool[Array, ""]:
    """Return whether all entries of all leaves are finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def next_scale(config: LossScalingConfig, state: LossScale, finite: Bool[Array, ""]) -> LossScale:
    """Return the scale after a step.

    It grows on exactly the `growth_interval`-th finite step in a row, unless it would overflow.
    """
    count = jnp.where(finite, state.finite_steps + 1, 0)
    due = count >= config.growth_interval
    grown = state.scale * config.growth_factor
    raised = jnp.where(due & jnp.isfinite(grown), grown, state.scale)
    lowered = jnp.maximum(state.scale * config.backoff_factor, config.minimum)
    return LossScale(
        scale=jnp.where(finite, raised, lowered),
        finite_steps=jnp.where(due, 0, count),
        skipped_steps=state.skipped_steps + jnp.where(finite, 0, 1),
    )
