"""JAX's checks of a compiled function, in a second program whose results are dropped: the first keeps its bytes."""

import functools
import importlib
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.experimental import checkify

from gradtrail.core.config import ConfigError
from gradtrail.core.xla.compile_log import project_line

CHECKS = {"nan": checkify.nan_checks, "div": checkify.div_checks, "index": checkify.index_checks}


def compile_checks(name: str, function: Callable[..., Any], args: Any, checks: Collection[str]) -> Callable[..., None]:
    """Compile checks of a function: a function of its arguments that raises ConfigError, one line, if one fails.

    Writes at an index out of bounds are not checked: JAX drops them by definition, and its check fails on batches.
    """
    rules = importlib.import_module("jax._src.checkify")
    scatters = [primitive for primitive in rules.error_checks if primitive.name.startswith("scatter")]
    rules.error_checks.update(
        {primitive: functools.partial(rules.nan_error_check, primitive) for primitive in scatters}
    )
    checked = checkify.checkify(function, errors=frozenset().union(*(CHECKS[check] for check in checks)))
    try:
        program = jax.jit(lambda *args: checked(*args)[0]).lower(*args).compile()
    except TypeError as error:  # over several devices, for example
        raise ConfigError(f"runtime.checkify: JAX cannot check {name}: {error}") from None

    def check(*args: Any) -> None:
        if fault := program(*args).get_exception():
            frames = fault.traceback_info.as_python_traceback()
            raise ConfigError(f"runtime.checkify: {name}: {str(fault).strip().rstrip('.')}, at {project_line(frames)}")

    return check
