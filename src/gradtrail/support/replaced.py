"""Replaces functions of a library for a moment, to set an option that their caller cannot pass."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of a module, by name, while the block runs."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)
