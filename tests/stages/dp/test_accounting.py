"""Privacy accounting, against quadrature and another library."""

import dataclasses
import math

import numpy as np
import pytest
from factories import train_config
from scipy.stats import norm

from gradtrail.core.config import ConfigError
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.stages.dp.accounting import Steps, account, find_noise, guarantee_of

DELTA = 1e-5


def private(epochs: int = 3, batch_size: int = 100, members: int = 1, **privacy: object) -> TrainConfig:
    privacy_config = dataclasses.replace(NOT_PRIVATE, enabled=True, **{"epsilon": 2.0, **privacy})  # type: ignore[arg-type]
    return train_config(epochs=epochs, batch_size=batch_size, members=members, privacy=privacy_config)


def divergence_of_one_step(rate: float, noise: float, epsilon: float) -> float:
    """Return delta of one step on a Poisson-sampled batch by quadrature, for the worse of the two directions."""
    x, width = np.linspace(-12 * noise, 12 * noise + 1, 2_000_001, retstep=True)
    without = norm.pdf(x, 0, noise)
    with_it = (1 - rate) * without + rate * norm.pdf(x, 1, noise)
    pairs = ((with_it, without), (without, with_it))
    return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * width) for p, q in pairs)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 0.6), (0.5, 2.0)])
def test_sampled_step_agrees_with_quadrature(rate: float, noise: float) -> None:
    epsilon = Steps(rate=rate, noise_multiplier=noise, number=1).epsilon(DELTA)
    assert divergence_of_one_step(rate, noise, epsilon) <= DELTA
    assert divergence_of_one_step(rate, noise, 0.995 * epsilon) > DELTA


@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(1.2, 0.01, 300), (8.0, 1.0, 10)])
def test_noise_is_the_smallest_of_four_digits_that_is_enough(epsilon: float, rate: float, steps: int) -> None:
    noise = find_noise(epsilon, DELTA, rate=rate, steps=steps)
    assert noise == float(f"{noise:.4g}")
    assert Steps(rate=rate, noise_multiplier=noise, number=steps).epsilon(DELTA) <= epsilon
    unit = 10.0 ** (math.floor(math.log10(noise)) - 3)
    assert Steps(rate=rate, noise_multiplier=noise - unit, number=steps).epsilon(DELTA) > epsilon


def test_epsilon_rises_to_the_requested_one() -> None:
    config = private(epochs=30)
    spending = account(config, 1000)
    assert list(spending.epsilons) == sorted(spending.epsilons)
    assert len(spending.epsilons) == 30
    assert 0.99 * 2.0 < spending.epsilons[-1] <= 2.0
    for epoch in (1, 2, 15):  # epochs between the points of the curve have epsilon of a later one
        steps = Steps(rate=0.1, noise_multiplier=spending.noise_multiplier, number=10 * epoch)
        assert steps.epsilon(DELTA) * 0.9999 < spending.epsilons[epoch - 1] < 1.5 * steps.epsilon(DELTA)
    assert account(config, 1000) == spending


def test_members_without_a_finite_epsilon_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Steps.epsilon
    monkeypatch.setattr(Steps, "epsilon", lambda self, delta: math.inf if self.number > 30 else exact(self, delta))
    config = private(epsilon=None, noise_multiplier=2.0)
    assert account(config, 1000).epsilons
    with pytest.raises(
        ConfigError, match=r"noise_multiplier must be large enough, or train\.members few enough, .* got 2 and 2"
    ):
        account(dataclasses.replace(config, members=2), 1000)


def test_members_compose_in_the_guarantee() -> None:
    config = private(epsilon=None, noise_multiplier=2.0)
    one = guarantee_of(config, account(config, 1000), 1000, [3])
    config = dataclasses.replace(config, members=2)
    both = guarantee_of(config, account(config, 1000), 1000, [3, 3])
    assert one.epsilon == one.epsilon_each == both.epsilon_each < both.epsilon
    expected = Steps(rate=0.1, noise_multiplier=2.0, number=60).epsilon(DELTA * (1 - 2e-6))
    assert both.epsilon == pytest.approx(expected, rel=1e-8)
    assert (one.steps, both.steps) == (30, 60)
    assert all(one.epsilon < guarantee.epsilon_rdp for guarantee in (one, both))


def test_early_end_spends_all_epochs() -> None:
    config = dataclasses.replace(private(epsilon=None, noise_multiplier=2.0), patience=1)
    spending = account(config, 1000)
    assert guarantee_of(config, spending, 1000, [2]).steps == 30
    ended = guarantee_of(dataclasses.replace(config, patience=None), spending, 1000, [2])
    assert ended.steps == 20
    assert ended.epsilon == pytest.approx(spending.epsilons[1], rel=1e-8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (private(delta=1e-3), r"train\.privacy\.delta must be .* 1 / 1,000, got 0\.001"),
        (private(delta=1e-12), r"train\.privacy\.delta must be .* got 1e-12"),
        (private(batch_size=1001), r"train\.batch_size must be at most .* 1,000, got 1,001"),
        (private(epochs=100_000, batch_size=1000, epsilon=1e-3, delta=1e-9), r"train\.privacy\.epsilon must be"),
    ],
)
def test_impossible_budget_is_refused_in_one_line(config: TrainConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        account(config, 1000)
    assert "\n" not in str(caught.value)


# mean batch size, examples, noise multiplier, steps, delta: epsilon by PRV, by RDP
# By Opacus 1.6.0 (`PRVAccountant` with eps_error=0.001, `RDPAccountant`).
OPACUS = {
    (512, 55_000, 2.3, 1_080, 1e-5): (0.5040075587818773, 0.5549804060347688),
    (256, 60_000, 1.1, 14_100, 1e-5): (2.3862659181490056, 2.6003429386103023),
    (2_048, 55_000, 0.84, 405, 1e-6): (8.122027716620522, 8.998857604200273),
}


@pytest.mark.parametrize(("setting", "epsilons"), OPACUS.items(), ids=str)
def test_epsilon_is_that_of_opacus(setting: tuple[int, int, float, int, float], epsilons: tuple[float, float]) -> None:
    batch_size, num_examples, noise_multiplier, number, delta = setting
    steps = Steps(rate=batch_size / num_examples, noise_multiplier=noise_multiplier, number=number)
    prv, rdp = epsilons
    assert steps.epsilon(delta) == pytest.approx(prv, rel=0.01)
    assert steps.epsilon_by_rdp(delta) == pytest.approx(rdp, rel=0.01)
    assert steps.epsilon(delta) < steps.epsilon_by_rdp(delta)
