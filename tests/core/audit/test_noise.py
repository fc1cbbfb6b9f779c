"""Planted labels, and the streams of random numbers of an audit."""

import numpy as np

from gradtrail.core.audit.noise import draw_confused, draw_uniform, plant
from gradtrail.core.audit.streams import Stream, stream

LABELS = np.random.default_rng(0).integers(0, 4, 20_000).astype(np.int32)


def test_uniform_labels_are_each_other_class_equally_often() -> None:
    drawn = draw_uniform(LABELS, 4, seed=1)
    counts = np.bincount(LABELS * 4 + drawn, minlength=16).reshape(4, 4)
    assert drawn.dtype == np.int32
    assert not np.diagonal(counts).any()
    assert np.allclose(counts[~np.eye(4, dtype=bool)] / len(LABELS), 1 / 12, atol=0.01)


def test_confused_labels_follow_the_probabilities_of_the_other_classes() -> None:
    inputs = np.array([0.7, 0.2, 0.1, 0.0])
    drawn = draw_confused(np.tile(inputs, (len(LABELS), 1)), np.zeros_like(LABELS), seed=1)
    assert np.allclose(np.bincount(drawn, minlength=4) / len(LABELS), [0, 2 / 3, 1 / 3, 0], atol=0.01)


def test_a_certain_network_still_confuses_to_another_class() -> None:
    certain = np.eye(4)[LABELS]
    assert not np.any(draw_confused(certain, LABELS, seed=1) == LABELS)


def test_planting_replaces_the_given_share_of_labels() -> None:
    wrong = draw_uniform(LABELS, 4, seed=1)
    planted = plant(LABELS, wrong, 0.1, seed=2)
    changed = planted != LABELS
    assert changed.sum() == 2000
    assert np.array_equal(planted[changed], wrong[changed])
    assert np.array_equal(planted, plant(LABELS, wrong, 0.1, seed=2))
    assert not np.array_equal(planted, plant(LABELS, wrong, 0.1, seed=3))


def test_no_two_streams_coincide() -> None:
    drawn = {
        (identity, which): stream(0, identity, *which).generate_state(4).tobytes()
        for identity in Stream
        for which in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    }
    other_values = {
        np.random.SeedSequence(seed).generate_state(4).tobytes() for seed in (0, (0, 0), (0, 1), (0, 2), (0, 2, 1))
    }
    assert len(set(drawn.values())) == len(drawn)
    assert not other_values & set(drawn.values())
