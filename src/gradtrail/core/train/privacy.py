"""The section `train.privacy` of `params.yaml`, and the capacity of Poisson-sampled batches."""

import math
from dataclasses import dataclass
from typing import Literal

from gradtrail.core.common.validation import AT_LEAST_ONE, POSITIVE, POSITIVE_SHARE, check_fields
from gradtrail.core.config import LARGEST

OVERFLOW_SHARE = 1e-6  # chance that any batch of a training exceeds the capacity, as share of delta
_SHA256_DIGITS = 64


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Differentially private training: DP-SGD (Abadi et al., arXiv 1607.00133) with any optimizer.

    The gradient of each example is clipped to `example_clip_norm`, the sum over a Poisson-sampled batch gets Gaussian
    noise, and the optimizer sees the sum divided by `batch_size`, which is the mean size of a batch.
    """

    enabled: bool  # True if the training is private; else the other fields have no effect
    # epsilon of the whole training, which determines the noise; None if `noise_multiplier` is a number
    epsilon: float | None
    # standard deviation of the noise over `example_clip_norm`; None if `epsilon` is a number
    noise_multiplier: float | None
    delta: float  # chance that epsilon does not hold; below one over the number of examples
    example_clip_norm: float  # L2 norm to which larger gradients of an example are scaled down
    # kind of sampling; `poisson` draws each example for each batch independently, with probability `batch_size` over
    # the number of examples
    sampling: Literal["poisson"]
    # number of augmentations of an example, whose mean gradient is clipped (De et al., arXiv 2204.13650)
    augmentation_multiplicity: int
    # digest, in hex, of a secret that the random numbers of batches and noise come from; None to draw them from the
    # seed, which anybody can repeat
    secret_sha256: str | None
    release: bool  # True if outputs about single training examples are left empty

    def __post_init__(self) -> None:
        check_fields(
            self,
            epsilon={"at_least": 1e-3, "at_most": 1e3},
            noise_multiplier={"at_least": 0.1, "at_most": LARGEST},
            delta={**POSITIVE_SHARE, "at_least": 1e-15},
            example_clip_norm=POSITIVE,
            augmentation_multiplicity={**AT_LEAST_ONE, "at_most": 1024},
        )
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"epsilon or noise_multiplier must be null, and the other one a number, got {self.epsilon} and "
                f"{self.noise_multiplier}"
            )
        digits = self.secret_sha256
        if digits is not None and (len(digits) != _SHA256_DIGITS or set(digits) - set("0123456789abcdef")):
            raise ValueError(f"secret_sha256 must be null or {_SHA256_DIGITS} hexadecimal digits, got {digits!r}")
        if self.enabled and self.release and digits is None:
            raise ValueError(
                "secret_sha256 must be given with release true, got null: noise from a seed that is known can be "
                "taken off again"
            )


NOT_PRIVATE = PrivacyConfig(
    enabled=False,
    epsilon=1.0,
    noise_multiplier=None,
    delta=1e-5,
    example_clip_norm=1.0,
    sampling="poisson",
    augmentation_multiplicity=1,
    secret_sha256=None,
    release=False,
)


def placeholder_noise(privacy: PrivacyConfig) -> float | None:
    """Return any noise multiplier for measuring static costs, which do not depend on it; None if not private."""
    return 1.0 if privacy.enabled else None


def batch_capacity(num_examples: int, batch_size: int, num_steps: int, *, delta: float) -> int:
    """Return the number of rows of every Poisson-sampled batch of a training.

    The chance that any of `num_steps` batches is larger is at most `OVERFLOW_SHARE` times `delta`: by the union bound
    and Chernoff's, P(X ≥ k) ≤ exp(-n KL(k/n ‖ q)) for X of Binomial(n, q) (Hoeffding, JASA 58, 1963, theorem 1).

    Args:
        num_examples: size n of the training split.
        batch_size: mean size of a batch, q n.
        num_steps: number of batches of the whole training.
    """
    rate = batch_size / num_examples
    needed_divergence = math.log(num_steps / (OVERFLOW_SHARE * delta)) / num_examples
    low, high = batch_size, num_examples  # the bound is too weak at the first, holds for sizes above the second
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _divergence(middle / num_examples, rate) >= needed_divergence else (middle, high)
    return high if rate < 1 else num_examples


def _divergence(share: float, rate: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions, in nats."""
    first_term = share * math.log(share / rate)
    return first_term + (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else first_term
