"""Independent streams of random numbers from the seed of an audit."""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """Purpose of a stream; the comment lists the numbers that select one."""

    FOLDS = 0  # round
    TRAINING = 1  # set of labels, round, fold
    PLANTED_LABELS = 2  # set of labels
    PLANTED_PLACES = 3  # set of labels
    COMPARED_LABELS = 4  # set of labels, split, kind of noise


def stream(seed: int, purpose: Stream, *numbers: int) -> np.random.SeedSequence:
    """Return the seed of one of the streams.

    The numbers form a spawn key: NumPy fills seeds up with zeros, so that (seed,), (seed, 0) and (seed, 0, 0), of
    another purpose or another stage, are one stream.
    """
    return np.random.SeedSequence(seed, spawn_key=(purpose, *numbers))
