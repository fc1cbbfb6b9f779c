"""Class structure, curvature, weights of checkpoints and summaries of scores against their definitions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from factories import initial_params, model_config, random_split
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from gradtrail.core.gradients import scores
from gradtrail.core.gradients.diagnostics import (
    ClassStructure,
    checkpoint_weights,
    class_structure,
    hessian_product,
    largest_eigenvalue,
)
from gradtrail.core.nn.models import Model
from gradtrail.core.per_example import summed_grad

GRADIENTS = np.random.default_rng(0).normal(size=(12, 7)) + 0.5
CLASSES = np.repeat([0, 1, 2], [5, 4, 3])


def structure(gradients: np.ndarray, classes: np.ndarray, num_classes: int = 3) -> ClassStructure:
    sums = np.stack([gradients[classes == label].sum(axis=0) for label in range(num_classes)])
    squares = np.array([np.sum(gradients[classes == label] ** 2) for label in range(num_classes)])
    return class_structure(sums @ sums.T, squares, np.bincount(classes, minlength=num_classes))


def test_class_structure_equals_its_definition() -> None:
    result = structure(GRADIENTS, CLASSES)
    means = [GRADIENTS[label == CLASSES].mean(axis=0) for label in range(3)]
    norms = [np.sqrt(np.mean(np.sum(GRADIENTS[label == CLASSES] ** 2, axis=1))) for label in range(3)]
    for one, other in itertools.product(range(3), repeat=2):
        cosine = means[one] @ means[other] / np.linalg.norm(means[one]) / np.linalg.norm(means[other])
        assert result.cosine[one, other] == pytest.approx(cosine)
        pairs = [
            GRADIENTS[i] @ GRADIENTS[j]
            for i in np.flatnonzero(one == CLASSES)
            for j in np.flatnonzero(other == CLASSES)
            if i != j
        ]
        assert result.coherence[one, other] == pytest.approx(np.mean(pairs) / norms[one] / norms[other])
    total = GRADIENTS.sum(axis=0)
    shares = [GRADIENTS[label == CLASSES].sum(axis=0) @ total / (total @ total) for label in range(3)]
    np.testing.assert_allclose(result.share, shares)
    assert result.share.sum() == pytest.approx(1)


@pytest.mark.parametrize("rounding", [1e-9, 0.0, -1e-9])
def test_classes_of_one_example_have_no_coherence_with_themselves(rounding: float) -> None:
    """The squares of sums and of norms are rounded differently, so that their difference is not exactly 0."""
    squares = np.array([4.0, 4.0, 9.0])
    products = np.array([[4 + rounding, 1, 2], [1, 4 - rounding, 2], [2, 2, 16]])
    result = class_structure(products, squares, np.array([1, 1, 2]))
    assert np.isnan(np.diag(result.coherence)[:2]).all()
    assert result.within == result.coherence[2, 2] == pytest.approx((16 - 9) / 2 / 4.5)
    alone = class_structure(products, squares, np.array([1, 1, 0]))
    assert np.isnan(alone.within)
    empty = structure(GRADIENTS[:6], CLASSES[:6], 3)
    assert np.isnan(empty.cosine[2]).all()
    assert np.isfinite(empty.within)
    assert np.isfinite(empty.across)
    assert np.isnan(ClassStructure.unknown(3).across)


@given(
    st.lists(st.integers(0, 6), min_size=1, unique=True).map(sorted),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_every_step_counts_for_the_epoch_that_lies_nearest(epochs: list[int], steps: int, trained: int) -> None:
    rates = np.random.default_rng(0).uniform(0.1, 1, steps * trained).astype(np.float32)
    expected = dict.fromkeys(epochs, 0.0)
    for step, rate in enumerate(rates):
        place = (step + 0.5) / steps
        expected[min(epochs, key=lambda epoch: abs(place - epoch))] += float(rate)
    result = checkpoint_weights(epochs, rates, steps)
    np.testing.assert_allclose(result, list(expected.values()), rtol=1e-6)
    assert result.sum() == pytest.approx(float(rates.sum()), rel=1e-6)


SPLIT = random_split(9)
IMAGES, LABELS = jnp.asarray(SPLIT.images), jnp.asarray(SPLIT.labels)
MASK = jnp.ones(9, bool)


@pytest.mark.parametrize("kind", ["linear", "mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_products_and_the_largest_eigenvalue_are_those_of_the_hessian(kind: str) -> None:
    model = Model(model_config(kind))
    params = initial_params(model)
    flat, unravel = ravel_pytree(params)

    def grad(params: dict) -> dict:
        return summed_grad(model, params, IMAGES, LABELS, MASK, label_smoothing=0.1)

    hessian = np.asarray(jax.jit(jax.jacrev(lambda flat: ravel_pytree(grad(unravel(flat)))[0]))(flat), np.float64)
    direction = np.random.default_rng(1).normal(size=flat.shape).astype(np.float32)
    product = jax.jit(lambda direction: hessian_product(grad, params, direction))
    along = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(product(unravel(direction)))])
    np.testing.assert_allclose(along, hessian @ direction, rtol=1e-3, atol=1e-3)
    eigenvalues = np.linalg.eigvalsh((hessian + hessian.T) / 2)
    largest = eigenvalues[np.argmax(np.abs(eigenvalues))]
    result = largest_eigenvalue(product, params, 60, seed=2)
    assert result == pytest.approx(largest, rel=0.02)


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
