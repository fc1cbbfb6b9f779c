"""The section `train.privacy` of `params.yaml`, and how many examples a step of a private training has room for."""

import math
from dataclasses import dataclass
from typing import Literal

from gradtrail.core.common.validation import AT_LEAST_ONE, LARGEST, POSITIVE, POSITIVE_SHARE, check_fields

OVERFLOW_SHARE = 1e-6  # of delta: the chance that any batch of a training is larger than there is room for
_SHA256_DIGITS = 64


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Differentially private training: DP-SGD (Abadi et al., arXiv 1607.00133) with any optimizer.

    The gradient of each example is clipped to `example_clip_norm`, the sum over a Poisson-sampled batch gets Gaussian
    noise, and the optimizer sees the sum divided by `batch_size`, which is the mean size of a batch.

    Attributes:
        enabled: whether the training is private; the other fields count only where it is.
        epsilon: of the whole training, from which the noise is found; None where `noise_multiplier` is given.
        noise_multiplier: standard deviation of the noise over `example_clip_norm`; None where `epsilon` is given.
        delta: chance that epsilon does not hold; below one over the number of examples.
        example_clip_norm: L2 norm to which larger gradients of an example are scaled down.
        sampling: each example is in each batch by a draw of its own, with probability `batch_size` over the number of
            examples.
        augmentation_multiplicity: augmentations of an example whose mean gradient is clipped (De et al., arXiv
            2204.13650).
        secret_sha256: digest, in hex, of a secret that the random numbers of batches and noise come from; None to draw
            them from the seed, which anybody can repeat.
        release: whether outs that tell of single training examples are left empty.
    """

    enabled: bool
    epsilon: float | None
    noise_multiplier: float | None
    delta: float
    example_clip_norm: float
    sampling: Literal["poisson"]
    augmentation_multiplicity: int
    secret_sha256: str | None
    release: bool

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


def noise_of_measurements(privacy: PrivacyConfig) -> float | None:
    """Return a noise multiplier for a program whose costs are measured, which do not depend on it; None for none."""
    return 1.0 if privacy.enabled else None


def batch_capacity(num_examples: int, batch_size: int, num_steps: int, *, delta: float) -> int:
    """Return the rows that every Poisson-sampled batch of a training has room for.

    The chance that any of `num_steps` batches is larger is at most `OVERFLOW_SHARE` times `delta`: by the union bound
    and Chernoff's, P(X ≥ k) ≤ exp(-n KL(k/n ‖ q)) for X of Binomial(n, q) (Hoeffding, JASA 58, 1963, theorem 1).

    Args:
        num_examples: n, of the training split.
        batch_size: mean size of a batch, q n.
        num_steps: batches of the whole training.
        delta: of the privacy guarantee.
    """
    rate = batch_size / num_examples
    wanted = math.log(num_steps / (OVERFLOW_SHARE * delta)) / num_examples
    low, high = batch_size, num_examples  # the bound is too weak at the first, holds for sizes above the second
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _divergence(middle / num_examples, rate) >= wanted else (middle, high)
    return high if rate < 1 else num_examples


def _divergence(share: float, rate: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions, in nats."""
    found = share * math.log(share / rate)
    return found + (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else found
