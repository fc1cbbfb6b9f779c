"""Bounds on config values, checked where the config is made and worded the same everywhere."""

import operator

MAX_PICTURES = 400  # in a gallery: more would make no picture that anybody looks at


class ConfigError(ValueError):
    """Values that are each allowed but do not fit together, or not the data or the machine; one line."""


def check(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise ValueError, in one line that begins with `name`, unless `value` lies within every given bound."""
    bounds = [
        (at_least, "at least", operator.ge),
        (above, "above", operator.gt),
        (at_most, "at most", operator.le),
        (below, "below", operator.lt),
    ]
    asked = [(f"{word} {bound:g}", bool(holds(value, bound))) for bound, word, holds in bounds if bound is not None]
    if not all(held for _, held in asked):
        raise ValueError(f"{name} must be {' and '.join(words for words, _ in asked)}, got {value!r}")
