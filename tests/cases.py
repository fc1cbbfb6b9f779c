"""Cases of one test, of which `make test` takes a few and `make test-slow` the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(every: Iterable[Any], *, fast: Collection[Any]) -> list[Any]:
    """Return every case, in its order; those that are not in `fast` are slow. A tuple is a value for each argument."""
    every = list(every)
    assert all(case in every for case in fast)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in fast else pytest.mark.slow)
        for case in every
    ]
