"""Epsilon by the accountants of Opacus, for the settings with which a test compares ours.

    OPACUS_ENVIRONMENT/bin/python -m benchmarks.opacus_accountant

It needs Opacus alone, in an environment of its own (`benchmarks.private_training` says how to make it), and prints one
line for each setting: the setting, epsilon by privacy loss random variables (PRV: Gopi et al., arXiv 2106.02848) with
its error bound, and epsilon by Rényi differential privacy. Both take Poisson sampling and add-or-remove-one neighbours.

The values stand as constants in `tests/stages/artifacts/test_accounting.py`.
"""

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training.

    Attributes:
        batch_size: mean size of a batch.
        noise_multiplier: standard deviation of the noise over the norm that examples are clipped to.
    """

    batch_size: int
    num_examples: int
    noise_multiplier: float
    steps: int
    delta: float


SETTINGS = (
    Setting(batch_size=512, num_examples=55_000, noise_multiplier=2.3, steps=1_080, delta=1e-5),
    Setting(batch_size=2_048, num_examples=55_000, noise_multiplier=2.0, steps=405, delta=1e-5),
    Setting(batch_size=256, num_examples=60_000, noise_multiplier=1.1, steps=14_100, delta=1e-5),
    Setting(batch_size=128, num_examples=55_000, noise_multiplier=0.6, steps=4_300, delta=1e-6),
    Setting(batch_size=2_048, num_examples=55_000, noise_multiplier=0.84, steps=405, delta=1e-6),
)
EPSILON_ERROR = 1e-3  # of PRV, which is at most so much above and below


def main() -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    print(f"opacus {version('opacus')}, torch {version('torch')}")
    for setting in SETTINGS:
        prv, rdp = PRVAccountant(), RDPAccountant()
        for accountant in (prv, rdp):
            accountant.history = [
                (setting.noise_multiplier, setting.batch_size / setting.num_examples, setting.steps),
            ]
        epsilons = {
            "prv": float(prv.get_epsilon(setting.delta, eps_error=EPSILON_ERROR)),
            "rdp": float(rdp.get_epsilon(setting.delta)),
        }
        print(json.dumps(asdict(setting) | epsilons))


if __name__ == "__main__":
    main()
