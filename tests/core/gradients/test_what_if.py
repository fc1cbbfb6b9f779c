"""Outputs and the measure of smoothness are those of their formulas."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import NUM_CLASSES, SHAPE, params_on_device, random_split, train_config
from scipy import stats

from gradtrail.core.gradients.what_if import WhatIfConfig, make_outputs, measure_lds, metasmoothness
from gradtrail.core.nn.losses import cross_entropy, log_odds
from gradtrail.core.nn.models import Model, Params

TEST, VALIDATION = random_split(4), random_split(14)[4:]
CHANGES = -np.eye(5, dtype=np.float32)


def test_outputs_are_margins_and_the_mean_loss_of_validation() -> None:
    """Also if the last batch is padded, full, or the only one."""
    model = Model(train_config(model="linear").model_config(SHAPE, NUM_CLASSES))
    params = params_on_device(model)
    outputs = [make_outputs(model, TEST, VALIDATION, batch_size) for batch_size in (4, 10, 16)]

    @jax.jit
    def with_derivatives(functions: list[Callable], params: Params) -> list[tuple]:
        return [(function(params), jax.jacrev(function)(params)) for function in functions]

    def direct(params: Params) -> jax.Array:
        test, validation = (map(jnp.asarray, (split.images, split.labels)) for split in (TEST, VALIDATION))
        images, labels = test
        margins = log_odds(model.apply(params, images), labels)
        images, labels = validation
        return jnp.append(margins, jnp.mean(cross_entropy(model.apply(params, images), labels)))

    *results, expected = with_derivatives([*outputs, jax.tree_util.Partial(direct)], params)
    for result in results:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), result, expected)


RESPONSES = {  # share of the changes that is made → factor of the effect on the margins; the metasmoothness
    "proportional": (lambda share: share, 1.0),
    "one half more": (lambda share: share + share**2, 1.0),
    "back again": (lambda share: share * (1 - share), -1.0),
    "none": (lambda _: 0.0, 0.0),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_metasmoothness_is_one_if_the_second_half_of_a_change_does_what_the_first_did(name: str) -> None:
    response, expected = RESPONSES[name]
    calls = []

    def margins_after(changes: np.ndarray) -> np.ndarray:
        share = -changes.min()
        calls.append(share)
        return np.float32(3) + response(share) * np.arange(6, dtype=np.float32) ** 2

    start = margins_after(np.zeros_like(CHANGES))
    assert metasmoothness(start, margins_after, [CHANGES, CHANGES]) == pytest.approx(expected)
    assert calls == [0.0, 0.5, 1.0, 0.5, 1.0]


def test_metasmoothness_is_the_mean_over_subsets() -> None:
    margins = iter(np.float32([[0, 0, 0], [1, 2, 3], [2, 4, 6], [1, 2, 3], [0, 0, 0]]))
    assert metasmoothness(next(margins), lambda _: next(margins), [CHANGES, CHANGES]) == pytest.approx((1 - 1) / 2)


def test_test_example_that_is_named_twice_is_refused() -> None:
    config = WhatIfConfig(test_examples=(), num_examples=8, memory_mib=1024)
    with pytest.raises(ValueError, match=r"^test_examples must name each example once, got \[3, 5, 3\]$"):
        dataclasses.replace(config, test_examples=(3, 5, 3))


def test_lds_is_the_mean_of_spearmans_correlations() -> None:
    rng = np.random.default_rng(1)
    real = rng.normal(size=(12, 2))
    predicted = real + rng.normal(size=(12, 2)) * [0.1, 2.0]
    by_output, mean = measure_lds(predicted, real)
    assert by_output == pytest.approx(
        [stats.spearmanr(*pair).statistic for pair in zip(predicted.T, real.T, strict=True)]
    )
    assert mean.value == pytest.approx(np.mean(by_output))
    assert mean.low < mean.value < mean.high < 1
    assert mean.high - mean.low > 0.1
