"""Planted faults are found by an audit, and faultless trainings pass."""

import dataclasses
import time

import numpy as np
import pytest
from factories import NUM_CLASSES, privacy_audit_config, random_split, split_of, train_config

from benchmarks import planted_faults
from gradtrail.core.common.split import Split
from gradtrail.core.common.validation import ConfigError
from gradtrail.core.nn.models import Model
from gradtrail.core.privacy_audit.training import compile_audit
from gradtrail.core.train.optimizers import SGDConfig
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.privacy_audit import tables
from gradtrail.stages.privacy_audit.auditing import Audit, Claim, audit, draw_canaries, require_private
from gradtrail.stages.privacy_audit.bounds import Guesses
from gradtrail.stages.privacy_audit.checks import Check

CLAIM = Claim(epsilon=3.0, delta=1e-5)


def finding(**overrides: object) -> Audit:
    guessed = Guesses(canaries=40, guesses=20, correct=15)
    audit_result = Audit(
        claim=CLAIM,
        confidence=0.95,
        scores=np.linspace(-1, 2, 40),
        coins=np.arange(40) % 3 == 0,
        guesses=guessed,
        lower_bound=1.25,
        lower_bound_any=0.75,
        by_share=((guessed, 1.25), (Guesses(canaries=40, guesses=40, correct=22), 0.0)),
        checks=(Check(name="noise_scale", value=1.0, low=0.99, high=1.01),),
        accuracy=0.5,
    )
    return dataclasses.replace(audit_result, **overrides)


@pytest.mark.parametrize(
    ("overrides", "faults"),
    [
        ({"lower_bound": 3.1}, ["epsilon_lower_bound"]),
        ({"lower_bound_any": 3.1}, ["epsilon_lower_bound"]),
        ({"checks": (Check(name="visits", value=2.0, low=0.0, high=1.0),)}, ["visits"]),
    ],
)
def test_faults_are_named(overrides: dict, faults: list[str]) -> None:
    assert finding(**overrides).faults == faults
    assert tables.measure(finding(**overrides))["faults"] == faults[0]


def test_training_that_is_not_private_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^train\.privacy\.enabled must be true for a privacy audit, got false$"):
        require_private(train_config())
    require_private(train_config(privacy=dataclasses.replace(NOT_PRIVATE, enabled=True)))


def test_too_many_canaries_are_refused_by_the_name_of_the_key() -> None:
    config = privacy_audit_config(canaries="mislabelled", num_canaries=31)
    with pytest.raises(ConfigError, match=r"^privacy_audit\.num_canaries must be at most .* 30, got 31$"):
        draw_canaries(config, random_split(30), NUM_CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *planted_faults.FAULTS])
def test_planted_faults_are_found_and_a_faultless_training_passes(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault:
        monkeypatch.setattr(*planted_faults.FAULTS[fault])
    faults = audited().faults
    assert bool(faults) == bool(fault), faults


def audited() -> Audit:
    """An audit of softmax regression on noise with a dark margin, at epsilon 3 (`find_noise`)."""
    train, config = images_with_a_margin(), private_config()
    settings = privacy_audit_config(num_canaries=600, guess_share=0.1)
    canaries = draw_canaries(settings, train, NUM_CLASSES)
    model = Model(config.model_config((28, 28), NUM_CLASSES))
    noise = 1.75
    watched = compile_audit(config, model, len(train), len(canaries), noise, compiler=Compiler(time.perf_counter))
    return audit(settings, watched, train, canaries, CLAIM)


def images_with_a_margin() -> Split:
    rng = np.random.default_rng(0)
    images = np.zeros((1400, 28, 28), np.uint8)
    images[:, 8:20, 8:20] = rng.integers(0, 256, (1400, 12, 12))
    return split_of(images, rng.integers(0, NUM_CLASSES, 1400, dtype=np.int32))


def private_config() -> object:
    return train_config(
        model="linear",
        batch_size=200,
        epochs=10,
        sgd=SGDConfig(learning_rate=0.2, momentum=0.0, nesterov=False),
        schedule="constant",
        clip_norm=None,
        privacy=dataclasses.replace(NOT_PRIVATE, enabled=True),
    )
