"""Privacy accounting: the noise of a private training and its epsilon after each epoch, by `dp-accounting`.

Neighbours are data sets of which one has an example more (add or remove one); labels and pixels of an example count as
one. Every step is a Gaussian mechanism on a Poisson-sampled batch, and the steps compose. Privacy loss distributions
(PLD: Koskela et al., arXiv 1906.03049; Doroshenko et al., arXiv 2207.04380) give epsilon as an upper bound that is
about 2 in 10,000 too high; Rényi differential privacy (RDP: Mironov et al., arXiv 1908.10530) a looser one next to it.
Rounding of the gradients and of the noise to float32 is not accounted for, nor is what the choice of params on the same
examples spends. The examples of the validation split, which choose the best epoch and an early end, are not protected.

A batch that exceeds the capacity ends the training with an error. Its chance is at most `OVERFLOW_SHARE` of delta, and
is subtracted from delta here: unless the other examples alone fill a batch, which does not depend on the one example,
both neighbours' trainings run as if there were no limit.

`dp_accounting` takes seconds to import, so it is imported when a training is private, and only then.
"""

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any

from gradtrail.core.config import ConfigError
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.dp_sgd import OVERFLOW_SHARE
from gradtrail.stages.dp.guarantee import PrivacyGuarantee

SMALLEST_NOISE = 0.1  # as `noise_multiplier` in params.yaml
LARGEST_NOISE = 1e5
SMALLEST_DELTA = 1e-10  # below, rounding errors of FFTs would count
MOST_POINTS = 20  # epochs for which epsilon is found; those between have that of the next one, which is an upper bound
_CELLS = 20  # cells to a standard deviation of a step's privacy loss


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of a private training, each a Gaussian mechanism on a Poisson-sampled batch."""

    rate: float  # chance of an example to be in a batch
    noise_multiplier: float  # standard deviation of the noise over the norm that examples are clipped to
    number: int

    def epsilon(self, delta: float) -> float:
        """Return an upper bound of epsilon at `delta`, by PLD."""
        loss = _loss_of_step(self.rate, self.noise_multiplier).self_compose(self.number)
        return float(loss.get_epsilon_for_delta(delta))

    def epsilon_by_rdp(self, delta: float) -> float:
        """Return a looser upper bound of epsilon at `delta`, by RDP."""
        package = _package()
        accountant = package.rdp.RdpAccountant(neighboring_relation=package.NeighboringRelation.ADD_OR_REMOVE_ONE)
        event = package.PoissonSampledDpEvent(self.rate, package.GaussianDpEvent(self.noise_multiplier))
        accountant.compose(event, self.number)
        return float(accountant.get_epsilon(delta))


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The privacy budget of one member of a training."""

    noise_multiplier: float  # noise multiplier of every step, configured or calibrated
    epsilons: tuple[float, ...]  # epsilon after each epoch; upper bounds


def account(config: TrainConfig, num_examples: int) -> Spending:
    """Return the privacy budget that each member of a training on `num_examples` will spend.

    The noise is `privacy.noise_multiplier`, or the smallest that keeps `privacy.epsilon` in all epochs.

    Raises:
        ConfigError: delta or batch size do not fit the number of examples, no noise is enough, or all members together
            have no finite epsilon; one line.
    """
    privacy = config.privacy
    if config.batch_size > num_examples:
        raise ConfigError(
            f"train.batch_size must be at most the number of training examples, {num_examples:,}, "
            f"got {config.batch_size:,}"
        )
    if not SMALLEST_DELTA <= privacy.delta < 1 / num_examples:
        raise ConfigError(
            f"train.privacy.delta must be from {SMALLEST_DELTA:g} to below one over the number of training examples, "
            f"1 / {num_examples:,}, got {privacy.delta:g}: a larger one would allow to publish one of the examples"
        )
    noise, delta = privacy.noise_multiplier, _delta_without_overflow(privacy.delta, 1)
    if privacy.epsilon is not None:
        all_steps = steps_of(config, num_examples, 1.0, config.epochs)
        noise = find_noise(privacy.epsilon, delta, rate=all_steps.rate, steps=all_steps.number)
    assert noise is not None  # noqa: S101 (PrivacyConfig has one of both)
    epsilons: list[float] = []
    for point in sorted({math.ceil(config.epochs * (number + 1) / MOST_POINTS) for number in range(MOST_POINTS)}):
        epsilons += [steps_of(config, num_examples, noise, point).epsilon(delta)] * (point - len(epsilons))
    all_members = steps_of(config, num_examples, noise, config.epochs * config.members)
    if not math.isfinite(all_members.epsilon(_delta_without_overflow(privacy.delta, config.members))):
        raise ConfigError(
            f"train.privacy.noise_multiplier must be large enough, or train.members few enough, for a finite epsilon "
            f"of all members together at delta {privacy.delta:g}, got {noise:g} and {config.members}"
        )
    return Spending(noise_multiplier=noise, epsilons=tuple(epsilons))


def steps_of(config: TrainConfig, num_examples: int, noise_multiplier: float, epochs: int) -> Steps:
    """Return the steps of so many epochs, of one member or of several: their batches and noise are independent."""
    number = epochs * math.ceil(num_examples / config.batch_size)
    return Steps(rate=config.batch_size / num_examples, noise_multiplier=noise_multiplier, number=number)


def guarantee_of(config: TrainConfig, spending: Spending, num_examples: int, epochs: list[int]) -> PrivacyGuarantee:
    """Return the guarantee of a private training, with numbers rounded to 9 digits as in the metrics.

    All epochs of the config count as spent if it could end early: an end that depends on the data reveals something
    about them, and composition bounds require a fixed number of steps (Rogers et al., arXiv 1605.08294).

    Args:
        num_examples: size of the training split.
        epochs: number of epochs that each member was trained for.
    """
    privacy = config.privacy
    counted = epochs if config.patience is None else [config.epochs] * len(epochs)
    steps, delta = steps_of(config, num_examples, spending.noise_multiplier, sum(counted)), privacy.delta
    delta_left, epsilon_each = _delta_without_overflow(delta, len(counted)), spending.epsilons[max(counted) - 1]
    return PrivacyGuarantee(
        epsilon=_rounded(steps.epsilon(delta_left) if len(counted) > 1 else epsilon_each),
        epsilon_each=_rounded(epsilon_each),
        epsilon_rdp=_rounded(steps.epsilon_by_rdp(delta_left)),
        delta=_rounded(delta),
        noise_multiplier=_rounded(spending.noise_multiplier),
        example_clip_norm=privacy.example_clip_norm,
        sampling=privacy.sampling,
        batch_size=config.batch_size,
        num_examples=num_examples,
        steps=steps.number,
        members=config.members,
        augmentation_multiplicity=privacy.augmentation_multiplicity,
        has_secret=privacy.secret_sha256 is not None,
        release=privacy.release,
    )


def find_noise(epsilon: float, delta: float, *, rate: float, steps: int) -> float:
    """Return the smallest noise multiplier, rounded up to 4 digits, that keeps `epsilon` at `delta`; at least 0.1.

    `dp_accounting.calibrate_dp_mechanism` takes 20 seconds where this takes half of one: its accountant has cells of
    one size for any noise.

    Raises:
        ConfigError: it would have to be larger than 100,000; one line.
    """

    def excess(log_noise: float) -> float:
        steps_here = Steps(rate=rate, noise_multiplier=math.exp(log_noise), number=steps)
        return math.log(min(max(steps_here.epsilon(delta), 1e-300), 1e300) / epsilon)

    lowest, highest = math.log(SMALLEST_NOISE), math.log(LARGEST_NOISE)
    if excess(lowest) <= 0:
        return SMALLEST_NOISE
    if excess(highest) > 0:
        raise ConfigError(
            f"train.privacy.epsilon must be large enough for {steps:,} steps at rate {rate:.3g} and delta "
            f"{delta:.3g} with a noise multiplier of at most {LARGEST_NOISE:,.0f}, got {epsilon:g}"
        )
    from scipy.optimize import brentq  # late, as dp_accounting, which imports it anyway

    noise = math.exp(brentq(excess, lowest, highest, xtol=1e-6))
    unit = 10.0 ** (math.floor(math.log10(noise)) - 3)
    number = math.ceil(noise / unit)
    if excess(math.log(number * unit)) > 0:  # the root is exact to a millionth
        number += 1
    return float(f"{number * unit:.4g}")


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon at `delta` of the Gaussian mechanism whose noise has a deviation of 1 / `mu` sensitivities."""
    return float(_package().get_epsilon_gaussian(1 / mu, delta))


@functools.lru_cache(maxsize=1)
def _loss_of_step(rate: float, noise: float) -> Any:
    """Return the privacy loss distribution of one step.

    Its variance is about rate² (exp(1 / noise²) - 1). What cells of a certain width add to it is in proportion to
    the square of the width, so the cells are a share of the standard deviation; if noise is small, and the variance
    that of rare large losses, at most a hundredth of their size.
    """
    deviation = rate * math.sqrt(math.expm1(min(noise**-2, 500.0)))
    return _package().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=min(deviation / _CELLS, 0.01 * max(1, noise**-2))
    )


def _rounded(value: float) -> float:
    return float(f"{value:.9g}")


def _delta_without_overflow(delta: float, members: int) -> float:
    """Return delta minus the chance that a batch overflows."""
    return delta * (1 - members * OVERFLOW_SHARE)


@functools.cache
def _package() -> Any:
    import dp_accounting  # late: it takes seconds

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of Rényi orders that it leaves out
    return dp_accounting
