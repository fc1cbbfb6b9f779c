"""The checker that the import hook puts around every function of `gradtrail.core` while tests run."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# Registered as pytrees: JAX rebuilds them with shapes, flags or bare objects in place of arrays
PYTREES = (
    "Examples",
    "LossScale",
    "RowRecord",
    "Rows",
    "RunKeys",
    "Shared",
    "StepRecord",
    "TrainState",
)

_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as type checkers see it


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check a function's arguments and result, unless it is the constructor of a pytree."""
    is_constructor = function.__name__ == "__init__"
    return function if is_constructor and function.__qualname__.startswith(PYTREES) else _checked(function)
