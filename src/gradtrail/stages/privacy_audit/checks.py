"""Direct checks of a watched training: is the noise as large, and are noise and draws as independent, as stated?

Guesses of canaries see what an attacker sees; these checks detect faults that leak little, or in a way that the guesses
do not use. A faultless training fails any of them with a probability below one in a million.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from gradtrail.core.batching import PADDING
from gradtrail.core.privacy_audit.training import AuditTrace

_SIGMAS = 6.0
_CHANCE = 1e-8
_ROUNDING = 1e-3  # rounding error of noise that is the difference of two float32 numbers


@dataclass(frozen=True, kw_only=True)
class Check:
    """A measured number with its limits."""

    name: str  # subject of the check
    value: float  # measured value
    low: float  # least value that passes
    high: float  # largest value that passes

    @property
    def passes(self) -> bool:
        """Whether the value is within its limits; NaN is not."""
        return self.low <= self.value <= self.high


def check_training(trace: AuditTrace) -> list[Check]:
    """Check the noise of the first steps and the batches of all; a training without noise fails the first check."""
    return [check(trace) for check in _CHECKS]


def _noise_scale(trace: AuditTrace) -> Check:
    """Check the standard deviation of the noise, over that which is accounted for."""
    noise = trace.noise
    value = float(np.sqrt(np.mean(np.square(noise, dtype=np.float64)))) if noise.size else 0.0
    margin = max(_ROUNDING, _SIGMAS / np.sqrt(2 * noise.size)) if noise.size else _ROUNDING
    return Check(name="noise_scale", value=value, low=1 - margin, high=1 + margin)


def _noise_between_steps(trace: AuditTrace) -> Check:
    """Check the largest correlation between the noise of two steps, either sign."""
    noise = trace.noise.astype(np.float64)
    if len(noise) < 2 or not noise.any():
        return Check(name="noise_between_steps", value=0.0, low=0.0, high=1.0)
    high = max(_ROUNDING, _SIGMAS / np.sqrt(noise.shape[1]))
    directions = noise / np.sqrt(np.sum(np.square(noise), axis=1, keepdims=True))
    products = np.einsum("ak,bk->ab", directions, directions)  # no `@`: the order of sums in a BLAS varies
    value = float(np.abs(products[np.triu_indices(len(noise), 1)]).max())
    return Check(name="noise_between_steps", value=value, low=0.0, high=high)


def _noise_and_draws(trace: AuditTrace) -> Check:
    """Check whether the noise reveals the drawn examples, as it does if one key makes the bits of both.

    The draw of an example and the number of the noise at the same place are then functions of the same bits. The value
    is the mean of the noise at the places of the batch's examples, in standard errors.
    """
    places = [indices[(indices >= 0) & (indices < trace.noise.shape[1])] for indices in trace.batches]
    drawn = [row[place] for row, place in zip(trace.noise, places, strict=False)]  # the noise is of the first steps
    values = np.concatenate(drawn) if drawn else np.zeros(0)
    value = float(np.sum(values, dtype=np.float64) / np.sqrt(max(len(values), 1)))
    return Check(name="noise_and_draws", value=value, low=-_SIGMAS, high=_SIGMAS)


def _batch_sizes(trace: AuditTrace) -> Check:
    """Check the variance of the batches' sizes, over that of the binomial distribution."""
    sizes = np.sum(trace.batches != PADDING, axis=1)
    mean = trace.rate * trace.present.sum()
    value = float(np.mean(np.square(sizes - mean)) / (mean * (1 - trace.rate))) if trace.rate < 1 else 1.0
    low, high = (float(stats.chi2.ppf(chance, len(sizes)) / len(sizes)) for chance in (_CHANCE, 1 - _CHANCE))
    return Check(name="batch_sizes", value=value, low=low, high=high)


def _visits(trace: AuditTrace) -> Check:
    """Check the variance of how often an example was in a batch, over that of the binomial distribution.

    It is 0 if every epoch has each example once, and the number of epochs if all epochs are the same.
    """
    steps, rate = len(trace.batches), trace.rate
    visits = np.bincount(trace.batches[trace.batches != PADDING], minlength=len(trace.present))[trace.present]
    spread = steps * rate * (1 - rate)
    if not spread:
        return Check(name="visits", value=1.0, low=0.0, high=1.0)
    variance = (2 + (1 - 6 * rate * (1 - rate)) / spread) / len(
        visits
    )  # standard error of the mean of squares, fourth moment included
    margin = _SIGMAS * float(np.sqrt(max(variance, 0.0)))
    value = float(np.mean(np.square(visits - steps * rate)) / spread)
    return Check(name="visits", value=value, low=1 - margin, high=1 + margin)


_CHECKS: tuple[Callable[[AuditTrace], Check], ...] = (
    _noise_scale,
    _noise_between_steps,
    _noise_and_draws,
    _batch_sizes,
    _visits,
)
