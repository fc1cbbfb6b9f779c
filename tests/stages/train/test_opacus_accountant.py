"""Epsilon compared with the accountant of another library.

The values are those of Opacus 1.6.0 (`PRVAccountant` with eps_error=0.001, `RDPAccountant`), printed by
`python -m benchmarks.opacus_accountant` in an environment of its own.
"""

import pytest

from gradtrail.stages.artifacts.accounting import Steps

# mean batch size, examples, noise multiplier, steps, delta: epsilon by PRV, by RDP
OPACUS = {
    (512, 55_000, 2.3, 1_080, 1e-5): (0.5040075587818773, 0.5549804060347688),
    (2_048, 55_000, 2.0, 405, 1e-5): (1.6327940236170742, 1.7920228858556813),
    (256, 60_000, 1.1, 14_100, 1e-5): (2.3862659181490056, 2.6003429386103023),
    (128, 55_000, 0.6, 4_300, 1e-6): (4.522327972663102, 5.416120652500742),
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
