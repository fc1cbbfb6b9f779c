"""Replaces functions of a library for a moment, to set an option that their caller cannot pass."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of a module, by name, while the block runs."""
    previous = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(previous)
