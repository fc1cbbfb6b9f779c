"""A warning about classes with too few training examples."""

import sys

import numpy as np

_SHOWN = 10  # classes


def warn(labels: np.ndarray, num_classes: int, *, versions: int) -> None:
    """Print one line on stderr if a class has fewer than two training examples, counting versions of each."""
    counts = np.bincount(labels, minlength=num_classes) * versions
    small = [f"{label} ({counts[label]})" for label in np.flatnonzero(counts < 2)]
    if small:
        listed = ", ".join(small[:_SHOWN]) + (f" and {len(small) - _SHOWN} more" if len(small) > _SHOWN else "")
        print(
            f"preprocess: classes with fewer than two training examples: {listed}; `gradients` leaves them out of "
            "coherence_within_classes, and classes.csv has no coherence of such a class with itself",
            file=sys.stderr,
        )
