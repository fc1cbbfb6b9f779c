"""Scores tell canaries that were in batches from those that never were, and no better than chance where none was."""

import numpy as np
import pytest

from gradtrail.core.privacy_audit.scores import Products, batch_scores, fixed_order_scores, guess

STEPS, CANARIES, RATE = 200, 400, 0.1
EPOCHS = 20
LABELS = np.arange(CANARIES, dtype=np.int32) % 4
COINS = np.random.default_rng(1).integers(0, 2, CANARIES) == 1


def products(present: np.ndarray, *, seed: int = 0, noise: float = 1.0) -> Products:
    """Two layers: in one the canary adds its signal to unit noise, in the other there is nothing but loud noise."""
    rng = np.random.default_rng(seed)
    of_label = rng.normal(size=(STEPS, 1, 4))[..., LABELS]
    first = 0.8 * present[:, None] + np.sqrt(0.8) * noise * rng.normal(size=(STEPS, 1, CANARIES))
    second = 100 * rng.normal(size=(STEPS, 1, CANARIES))
    signals = np.broadcast_to(np.array([0.8, 0.2])[None, :, None], (STEPS, 2, CANARIES))
    result = np.concatenate([first + 30 * of_label, second], axis=1)
    return Products(products=result.astype(np.float32), signals=signals.astype(np.float32))


def share_right(scores: np.ndarray, share: float = 1.0) -> float:
    count, correct = guess(scores, COINS, round(share * CANARIES))
    return correct / count


def by_draw(rate: float = RATE, seed: int = 2) -> np.ndarray:
    return (np.random.default_rng(seed).uniform(size=(STEPS, CANARIES)) < rate) & COINS


def test_scores_separate_canaries_despite_labels_and_loud_layers() -> None:
    result = products(by_draw())
    scores = batch_scores(result, LABELS, RATE)
    assert share_right(scores) > 0.7
    assert share_right(scores, 0.1) > share_right(scores)
    assert share_right(np.sum(result.products, axis=(0, 1))) < 0.6, "the plain sum is lost in what is loud"


def test_guesses_are_chance_without_canaries_in_batches() -> None:
    result = products(np.zeros((STEPS, CANARIES), bool))
    assert share_right(batch_scores(result, LABELS, RATE)) == pytest.approx(0.5, abs=4 * 0.5 / CANARIES**0.5)


def test_fixed_order_score_detects_a_fixed_order() -> None:
    places = np.random.default_rng(3).integers(0, STEPS // EPOCHS, CANARIES)
    fixed = (np.arange(STEPS)[:, None] % (STEPS // EPOCHS) == places) & COINS
    result = products(fixed)
    by_place, by_draws = fixed_order_scores(result, LABELS, STEPS // EPOCHS), batch_scores(result, LABELS, RATE)
    assert share_right(by_place) > 0.9 > 0.85 > share_right(by_draws)


def test_guesses_are_the_extreme_scores() -> None:
    scores = np.array([5.0, -5.0, 1.0, -1.0, 0.0])
    coins = np.array([True, False, False, True, False])
    assert guess(scores, coins, 2) == (2, 2)
    assert guess(scores, coins, 4) == (4, 2)
    assert guess(scores, coins, 0) == (0, 0)
    assert guess(scores, coins, 5) == (5, 2)
