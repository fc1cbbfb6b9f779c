"""Privacy accounting: the noise of a private training and its epsilon after each epoch, by `dp-accounting`.

Neighbours are data sets of which one has an example more (add or remove one); labels and pixels of an example count as
one. Every step is a Gaussian mechanism on a Poisson-sampled batch, and the steps compose. Privacy loss distributions
(PLD: Koskela et al., arXiv 1906.03049; Doroshenko et al., arXiv 2207.04380) give epsilon as an upper bound that is
about 1 in 10,000 too high, 1 in 1,000 before the last epoch; Rényi differential privacy (RDP: Mironov et al., arXiv
1908.10530) a looser one next to it. Rounding of the gradients and of the noise to float32 is not accounted for, nor is
what the choice of params on the same examples spends. The examples of the validation split, which choose the best epoch
and an early end, are not protected.

A batch that is larger than there is room for ends the training with an error. Its chance is at most `OVERFLOW_SHARE` of
delta, and is subtracted from delta here: unless the other examples alone fill a batch, which does not depend on the
one example, both neighbours' trainings run as if there were no limit.

`dp_accounting` takes seconds to import, so it is imported when a training is private, and only then.
"""

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any

from gradtrail.core.config import ConfigError
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.privacy import OVERFLOW_SHARE

SMALLEST_NOISE = 0.1  # as `noise_multiplier` in params.yaml
LARGEST_NOISE = 1e5
SMALLEST_DELTA = 1e-10  # below, what FFTs round off would count
MOST_POINTS = 20  # epochs for which epsilon is found; those between have that of the next one, which is an upper bound
_ROUGH, _FINE = 10, 30  # cells to a standard deviation of a step's privacy loss: epsilon is 7 or 0.8 in 10,000 too high
_CUT = 1e-15  # of probability, in tails that are counted as infinite losses
_DIGITS = 4  # of the noise multiplier


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of a private training, each a Gaussian mechanism on a Poisson-sampled batch."""

    rate: float  # chance of an example to be in a batch
    noise_multiplier: float  # standard deviation of the noise over the norm that examples are clipped to
    number: int

    def epsilon(self, delta: float, *, cells: int = _FINE) -> float:
        """Return an upper bound of epsilon at `delta`, by PLD; `cells` to a standard deviation of a step's loss."""
        composed = _loss_of_step(self.rate, self.noise_multiplier, cells).self_compose(self.number)
        return float(composed.get_epsilon_for_delta(delta))

    def epsilon_by_rdp(self, delta: float) -> float:
        """Return a looser upper bound of epsilon at `delta`, by RDP."""
        package = _package()
        accountant = package.rdp.RdpAccountant(neighboring_relation=package.NeighboringRelation.ADD_OR_REMOVE_ONE)
        event = package.PoissonSampledDpEvent(self.rate, package.GaussianDpEvent(self.noise_multiplier))
        accountant.compose(event, self.number)
        return float(accountant.get_epsilon(delta))


@dataclass(frozen=True, kw_only=True)
class Spending:
    """The privacy budget that a training spends."""

    noise_multiplier: float  # noise multiplier of every step, configured or calibrated
    delta: float
    rate: float  # chance of an example to be in a batch
    steps_per_epoch: int  # number of steps of one member in an epoch
    epsilons: tuple[float, ...]  # epsilon of one member after each epoch; upper bounds
    may_end_early: bool = False  # True if results of the training decide when it ends

    def counted(self, epochs: list[int]) -> list[int]:
        """Return the number of epochs of each member that count as spent: the completed ones, or all of them.

        All, if it may end early: an end that depends on the data reveals something about them, and composition bounds
        require a number of steps that is fixed beforehand (Rogers et al., arXiv 1605.08294).
        """
        return [len(self.epsilons)] * len(epochs) if self.may_end_early else epochs

    def measure(self, epochs: list[int]) -> dict[str, float]:
        """Return the metrics of a training whose members count as trained for so many epochs, see `counted`.

        Returns:
            `epsilon`, by PLD, and `epsilon_rdp` of all members together, at `delta`; `noise_multiplier`; for several
            members also `epsilon_each`, the largest epsilon of one member.
        """
        epsilon_each = self.epsilons[max(epochs) - 1]
        metrics = {"delta": self.delta, "noise_multiplier": self.noise_multiplier}
        together = self._composed_steps(epochs)
        by_rdp = together.epsilon_by_rdp(_delta_without_overflow(self.delta, len(epochs)))
        if len(epochs) == 1:
            return {"epsilon": epsilon_each, "epsilon_rdp": by_rdp, **metrics}
        joint = together.epsilon(_delta_without_overflow(self.delta, len(epochs)))
        return {"epsilon": joint, "epsilon_each": epsilon_each, "epsilon_rdp": by_rdp, **metrics}

    def _composed_steps(self, epochs: list[int]) -> Steps:
        """Return the steps of all members, which compose as one training: batches and noise are independent."""
        number = sum(epochs) * self.steps_per_epoch
        return Steps(rate=self.rate, noise_multiplier=self.noise_multiplier, number=number)


def account(config: TrainConfig, num_examples: int) -> Spending:
    """Return the privacy budget that a training will spend.

    Args:
        config: the training; its noise is `privacy.noise_multiplier`, or the smallest, in 4 significant digits, with
            which each member keeps `privacy.epsilon` in all its epochs.
        num_examples: size of the training split.

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
    rate, steps_per_epoch = config.batch_size / num_examples, math.ceil(num_examples / config.batch_size)
    noise, delta = privacy.noise_multiplier, _delta_without_overflow(privacy.delta, 1)
    if noise is None:
        assert privacy.epsilon is not None  # noqa: S101 (as PrivacyConfig sees to)
        noise = find_noise(privacy.epsilon, delta, rate=rate, steps=config.epochs * steps_per_epoch)
    epsilons = _curve(noise, delta, rate=rate, steps_per_epoch=steps_per_epoch, epochs=config.epochs)
    if not math.isfinite(epsilons[-1]):
        raise ConfigError(
            f"train.privacy.noise_multiplier must be large enough for a finite epsilon at delta {privacy.delta:g}, "
            f"got {noise:g}"
        )
    spending = Spending(
        noise_multiplier=noise,
        delta=privacy.delta,
        rate=rate,
        steps_per_epoch=steps_per_epoch,
        epsilons=epsilons,
        may_end_early=config.patience is not None,
    )
    if config.members > 1 and not math.isfinite(spending.measure([config.epochs] * config.members)["epsilon"]):
        raise ConfigError(
            f"train.members must be few enough for a finite epsilon of all together at delta {privacy.delta:g}, "
            f"got {config.members} with a noise multiplier of {noise:g}"
        )
    return spending


def find_noise(epsilon: float, delta: float, *, rate: float, steps: int) -> float:
    """Return the smallest noise multiplier, of 4 significant digits, that keeps `epsilon` at `delta`; at least 0.1.

    Raises:
        ConfigError: it would have to be larger than 100,000; one line.
    """

    def excess(log_noise: float, cells: int = _ROUGH) -> float:
        epsilon_here = Steps(rate=rate, noise_multiplier=math.exp(log_noise), number=steps).epsilon(delta, cells=cells)
        return math.log(min(max(epsilon_here, 1e-300), 1e300) / epsilon)

    lowest, highest = math.log(SMALLEST_NOISE), math.log(LARGEST_NOISE)
    low = high = 0.0
    while excess(high) > 0:
        if high == highest:
            raise ConfigError(
                f"train.privacy.epsilon must be large enough for {steps:,} steps at rate {rate:.3g} and delta "
                f"{delta:.3g} with a noise multiplier of at most {LARGEST_NOISE:,.0f}, got {epsilon:g}"
            )
        low, high = high, min(high + 1, highest)
    while low == high or excess(low) <= 0:
        if low == lowest:
            return SMALLEST_NOISE
        low, high = max(low - 0.5, lowest), low
    from scipy.optimize import brentq  # late, as dp_accounting, which imports it anyway

    root = float(brentq(excess, low, high, xtol=1e-4))  # with a little more noise than is needed, the bound being rough
    slope = (excess(high) - excess(low)) / (high - low)
    root -= excess(root, _FINE) / slope
    unit = 10.0 ** (math.floor(math.log10(math.exp(root))) - _DIGITS + 1)
    number = math.ceil(math.exp(root) / unit)

    def is_enough(number: int) -> bool:
        return excess(math.log(_noise_of(number, unit)), _FINE) <= 0

    if is_enough(number):
        while is_enough(number - 1):
            number -= 1
    else:
        number += 1
        while not is_enough(number):
            number += 1
    return max(_noise_of(number, unit), SMALLEST_NOISE)


def _noise_of(number: int, unit: float) -> float:
    return float(f"{number * unit:.{_DIGITS}g}")


def _curve(noise: float, delta: float, *, rate: float, steps_per_epoch: int, epochs: int) -> tuple[float, ...]:
    """Return an upper bound of epsilon after each epoch: the last is a fine one, the others are rough."""
    points = sorted({math.ceil(epochs * (number + 1) / MOST_POINTS) for number in range(MOST_POINTS)})
    last = Steps(rate=rate, noise_multiplier=noise, number=epochs * steps_per_epoch).epsilon(delta)
    epsilons: list[float] = []
    so_far, one_epoch = None, _loss_of_step(rate, noise, _ROUGH).self_compose(steps_per_epoch)
    for point in points:
        new = one_epoch.self_compose(point - len(epsilons))
        so_far = new if so_far is None else so_far.compose(new, _CUT)
        value = last if point == epochs else min(float(so_far.get_epsilon_for_delta(delta)), last)
        epsilons += [value] * (point - len(epsilons))
    return tuple(epsilons)


@functools.lru_cache(maxsize=2)
def _loss_of_step(rate: float, noise: float, cells: int) -> Any:
    """Return the privacy loss distribution of one step.

    Its variance is about rate² (exp(1 / noise²) - 1). What cells of a certain width add to it is in proportion to
    the square of the width, so the cells are a share of the standard deviation; if noise is small, and the variance
    that of rare large losses, at most a hundredth of their size.
    """
    deviation = rate * math.sqrt(math.expm1(min(noise**-2, 500.0)))
    return _package().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=min(deviation / cells, 0.01 * max(1, noise**-2))
    )


def _delta_without_overflow(delta: float, members: int) -> float:
    """Return delta minus the chance that a batch overflows."""
    return delta * (1 - members * OVERFLOW_SHARE)


@functools.cache
def _package() -> Any:
    import dp_accounting  # late: it takes seconds

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of Rényi orders that it leaves out
    return dp_accounting
