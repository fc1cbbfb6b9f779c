"""Class structure against the gradients themselves, pair by pair."""

import itertools

import numpy as np
import pytest

from gradtrail.core.gradients.diagnostics import ClassStructure, class_structure

GRADIENTS = np.random.default_rng(0).normal(size=(12, 7)) + 0.5
CLASSES = np.repeat([0, 1, 2], [5, 4, 3])


def structure(gradients: np.ndarray, classes: np.ndarray, num_classes: int = 3) -> ClassStructure:
    sums = np.stack([gradients[classes == label].sum(axis=0) for label in range(num_classes)])
    squares = np.array([np.sum(gradients[classes == label] ** 2) for label in range(num_classes)])
    return class_structure(sums @ sums.T, squares, np.bincount(classes, minlength=num_classes))


def test_it_is_what_the_gradients_themselves_say() -> None:
    found = structure(GRADIENTS, CLASSES)
    means = [GRADIENTS[label == CLASSES].mean(axis=0) for label in range(3)]
    norms = [np.sqrt(np.mean(np.sum(GRADIENTS[label == CLASSES] ** 2, axis=1))) for label in range(3)]
    for one, other in itertools.product(range(3), repeat=2):
        cosine = means[one] @ means[other] / np.linalg.norm(means[one]) / np.linalg.norm(means[other])
        assert found.cosine[one, other] == pytest.approx(cosine)
        pairs = [
            GRADIENTS[i] @ GRADIENTS[j]
            for i in np.flatnonzero(one == CLASSES)
            for j in np.flatnonzero(other == CLASSES)
            if i != j
        ]
        assert found.coherence[one, other] == pytest.approx(np.mean(pairs) / norms[one] / norms[other])
    total = GRADIENTS.sum(axis=0)
    shares = [GRADIENTS[label == CLASSES].sum(axis=0) @ total / (total @ total) for label in range(3)]
    np.testing.assert_allclose(found.share, shares)
    assert found.share.sum() == pytest.approx(1)


def test_equal_gradients_are_wholly_coherent() -> None:
    found = structure(np.tile(GRADIENTS[:1], (12, 1)), CLASSES)
    np.testing.assert_allclose(found.coherence, 1)
    assert found.within == pytest.approx(1)
    assert found.across == pytest.approx(1)


def test_a_class_without_examples_or_with_one_is_no_fault() -> None:
    found = structure(GRADIENTS[:6], CLASSES[:6], 3)
    assert np.isnan(found.cosine[2]).all()
    assert np.isnan(found.coherence[1, 1]), "of one example there is no pair"
    assert np.isfinite(found.within)
    assert np.isfinite(found.across)


@pytest.mark.parametrize("rounding", [1e-9, 0.0, -1e-9])
def test_classes_of_one_example_have_no_coherence_with_themselves(rounding: float) -> None:
    """The squares of sums and of norms are rounded differently, so that their difference is not exactly 0."""
    squares = np.array([4.0, 4.0, 9.0])
    products = np.array([[4 + rounding, 1, 2], [1, 4 - rounding, 2], [2, 2, 16]])
    found = class_structure(products, squares, np.array([1, 1, 2]))
    assert np.isnan(np.diag(found.coherence)[:2]).all()
    assert found.within == found.coherence[2, 2] == pytest.approx((16 - 9) / 2 / 4.5)
    alone = class_structure(products, squares, np.array([1, 1, 0]))
    assert np.isnan(alone.within)
    assert np.isnan(ClassStructure.unknown(3).across)
