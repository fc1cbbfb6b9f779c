"""Ranks and summaries of scores against SciPy and their definitions."""

import functools

import jax
import numpy as np
import pytest
import scipy.stats
from factories import model_config, params_on_device, random_split
from gradient_oracles import float64_scores
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.gradients import scores
from gradtrail.core.nn.losses import CrossEntropy
from gradtrail.core.nn.models import Model

SPLIT, LOSS = random_split(11), CrossEntropy(label_smoothing=0.1)


@pytest.mark.parametrize(("network", "precision"), [("mlp", "float32"), ("cnn", "float32"), ("mlp", "bfloat16")])
def test_scores_are_those_in_float64_up_to_rounding(network: str, precision: str) -> None:
    model = Model(model_config(network, precision=precision))
    params = params_on_device(model)
    score = functools.partial(scores.score_batch, model, loss=LOSS)
    result = jax.jit(score)(params, SPLIT.images, SPLIT.labels)
    for name, expected in float64_scores(model, params, SPLIT.images, SPLIT.labels, loss=LOSS).items():
        error = np.max(np.abs(result[name] - expected) / np.maximum(np.abs(expected), np.sqrt(np.mean(expected**2))))
        least, most = (0, 1e-5) if precision == "float32" else (1e-5, 0.5)
        assert least < error < most, (name, error)


def test_summary_of_data_made_by_hand() -> None:
    norm = np.array([4.0, 1.0, 3.0, 2.0], np.float32)
    summary = scores.summarize(
        {
            "grad_norm": norm,
            "loss": norm**2,
            "margin": -norm,
            "input_norm": np.ones(4, np.float32),
            "el2n": np.array([4.0, 2.0, 3.0, 1.0], np.float32),
            "correct": np.array([False, True, True, True]),
        },
        top_fraction=0.5,
    )
    assert summary == pytest.approx(
        {
            "grad_norm_median": 2.5,
            "grad_norm_mean": 2.5,
            "grad_norm_max": 4.0,
            "rank_correlation_loss": 1.0,
            "rank_correlation_margin": -1.0,
            "rank_correlation_input_norm": 0.0,
            "rank_correlation_el2n": 0.8,
            "misclassified_among_largest": 0.5,
            "misclassified_overall": 0.25,
            "norm_held_by_largest": 0.7,
        }
    )


def test_the_largest_are_one_at_least_and_no_norm_at_all_is_no_fault() -> None:
    names = ("grad_norm", "loss", "margin", "input_norm", "el2n")
    nothing = {name: np.zeros(3, np.float32) for name in names} | {"correct": np.array([False, True, True])}
    summary = scores.summarize(nothing, top_fraction=0.01)
    assert summary["misclassified_among_largest"] == 1
    assert summary["norm_held_by_largest"] == 0


TIED = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30)


@given(TIED)
def test_ranks_equal_scipy_under_ties(values: list[float]) -> None:
    np.testing.assert_array_equal(scores.ranks(np.array(values)), scipy.stats.rankdata(values))


@given(st.lists(st.tuples(st.integers(0, 5).map(float), st.integers(0, 5).map(float)), min_size=3, max_size=30))
def test_rank_correlation_equals_scipy_and_is_0_where_a_side_is_constant(rows: list[tuple[float, float]]) -> None:
    left, right = np.array(rows).T
    constant = len(set(left)) == 1 or len(set(right)) == 1
    expected = 0.0 if constant else scipy.stats.spearmanr(left, right).statistic
    assert scores.rank_correlation(left, right) == pytest.approx(expected, abs=1e-9)


@given(TIED, st.integers(1, 40))
def test_largest_equals_a_sort_that_keeps_the_order_of_equals(values: list[float], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]
    assert scores.largest(np.array(values), count).tolist() == expected
