"""Independent streams of random numbers from the seed of an audit."""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What the numbers of a stream decide."""

    FOLDS = 0  # of a round
    TRAINING = 1  # of a network: of a set of labels, a round and a fold
    PLANTED_LABELS = 2  # of a set of labels
    PLANTED_PLACES = 3  # of a set of labels
    COMPARED_LABELS = 4  # of a set of labels, a split and a kind of noise


def stream(seed: int, of: Stream, *which: int) -> np.random.SeedSequence:
    """Return the seed of one of the streams.

    The numbers form a spawn key: NumPy fills seeds up with zeros, so that (seed,), (seed, 0) and (seed, 0, 0), of
    another purpose or another stage, are one stream.
    """
    return np.random.SeedSequence(seed, spawn_key=(of, *which))
