"""Cases of one test, of which `make test` takes a few and `make test-slow` the others."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def cases(every: Iterable[Any], *, fast: Container[Any]) -> list[Any]:
    """Return every case, in its order; those that are not in `fast` are slow. A tuple is a value for each argument."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in fast else pytest.mark.slow)
        for case in every
    ]
