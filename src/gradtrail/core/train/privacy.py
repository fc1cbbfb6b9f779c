"""The section `train.privacy` of `params.yaml`."""

from typing import Annotated, Literal

from gradtrail.core.config import LARGEST, Bounds, Positive, config

_SHA256_DIGITS = 64


@config
class PrivacyConfig:
    """Differentially private training: DP-SGD (Abadi et al., arXiv 1607.00133) with any optimizer.

    The gradient of each example is clipped to `example_clip_norm`, the sum over a Poisson-sampled batch gets Gaussian
    noise, and the optimizer sees the sum divided by `batch_size`, which is the mean size of a batch.
    """

    enabled: bool  # True if the training is private; else the other fields have no effect
    # epsilon of the whole training, which determines the noise; None if `noise_multiplier` is a number
    epsilon: Annotated[float, Bounds(at_least=1e-3, at_most=1e3)] | None
    # standard deviation of the noise over `example_clip_norm`; None if `epsilon` is a number
    noise_multiplier: Annotated[float, Bounds(at_least=0.1, at_most=LARGEST)] | None
    # chance that epsilon does not hold; below one over the number of examples
    delta: Annotated[float, Bounds(at_least=1e-15, below=1)]
    example_clip_norm: Positive  # L2 norm to which larger gradients of an example are scaled down
    # each batch has each example, independently, with probability `batch_size` over the number of examples
    sampling: Literal["poisson"]
    # augmentations of an example whose mean gradient is clipped (De et al., arXiv 2204.13650)
    augmentation_multiplicity: Annotated[int, Bounds(at_least=1, at_most=1024)]
    # digest, in hex, of a secret that the random numbers of batches and noise come from; None to draw them from the
    # seed, which anybody can repeat
    secret_sha256: str | None
    release: bool  # True if outputs about single training examples are redacted

    def check(self) -> None:
        """Raise ValueError, one line, for fields that do not fit together."""
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
