"""Bounds on the values of configs, checked when a config is created, with uniform error messages."""

import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

from gradtrail.core.config import LARGEST

MAX_WIDTH = 2**24  # units of a layer: XLA counts the bytes of its weights in int64

Bounds: TypeAlias = Mapping[str, float]  # keyword arguments of `check`
POSITIVE: Bounds = {"above": 0, "at_most": LARGEST}
NOT_NEGATIVE: Bounds = {"at_least": 0, "at_most": LARGEST}
AT_LEAST_ONE: Bounds = {"at_least": 1, "at_most": LARGEST}
SHARE: Bounds = {"at_least": 0, "below": 1}
POSITIVE_SHARE: Bounds = {"above": 0, "below": 1}
SEED: Bounds = {"at_least": 0, "below": 2**32}


def check_fields(config: Any, **bounds: Bounds) -> None:
    """Check fields of a config: `check_fields(self, momentum=SHARE)`.

    None is not checked; every entry of a tuple is.

    Raises:
        ValueError: one line that begins with the field's name.
    """
    for name, field_bounds in bounds.items():
        value = getattr(config, name)
        for entry in value if isinstance(value, tuple) else () if value is None else (value,):
            check(name, entry, **field_bounds)


def check(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Check one value against every given bound.

    Raises:
        ValueError: one line that begins with `name`.
    """
    bounds = [
        (at_least, "at least", operator.ge),
        (above, "above", operator.gt),
        (at_most, "at most", operator.le),
        (below, "below", operator.lt),
    ]
    checks = [
        (f"{word} {bound:{',' if isinstance(bound, int) else 'g'}}", bool(holds(value, bound)))
        for bound, word, holds in bounds
        if bound is not None
    ]
    if not all(is_met for _, is_met in checks):
        raise ValueError(f"{name} must be {' and '.join(words for words, _ in checks)}, got {value!r}")
