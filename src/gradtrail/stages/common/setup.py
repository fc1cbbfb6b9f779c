"""JAX's persistent compilation cache.

The cache is in `.gradtrail/xla/`, in one folder per version of jaxlib and kind of processor, because machine code for
another processor may not run. Cached code is executed as it is: do not copy the folder from a machine that you do not
trust.
"""

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from filelock import FileLock

from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common.environment import RuntimeConfig, processor_digest
from gradtrail.support.errors import one_line
from gradtrail.support.paths import private_folder

_CACHE_FAULT = re.compile(r"Error (reading|writing) persistent compilation cache entry for '.*?': (.*)", re.DOTALL)
_faults: dict[str, list[str]] = {"reading": [], "writing": []}  # reasons, since the last call of `take_cache_faults`


def set_up_cache() -> Path:
    """Enable the persistent compilation cache for every function; return its folder.

    JAX warns of every entry that it cannot read or write; `take_cache_faults` returns these warnings as one line.
    """
    folder = private_folder() / "xla" / f"jaxlib-{jaxlib.version.__version__}-{processor_digest()}"
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = jax.config  # whose switches mypy does not know
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    show = warnings.showwarning

    def keep_fault(message: Warning | str, *location: Any, **options: Any) -> None:
        if fault := _CACHE_FAULT.match(str(message)):
            _faults[fault[1]].append(one_line(fault[2]))
        else:
            show(message, *location, **options)

    warnings.showwarning = keep_fault
    warnings.filterwarnings("always", _CACHE_FAULT.pattern)  # else Python passes on equal warnings only once
    return folder


def take_cache_faults() -> tuple[int, list[str]]:
    """Return the number of cached programs rejected on load since the last call, and a warning for each kind of fault.

    JAX counts such a look-up as a miss, compiles the program, and keeps the entry as it is. If an entry was compiled
    for other machine features, XLA only logs an error: the program runs, and the look-up is a hit.
    """
    config: Any = jax.config  # whose switches mypy does not know
    folder = config.jax_compilation_cache_dir
    rejected, unwritten = _faults.values()
    _faults.update(reading=[], writing=[])
    lines = []
    if rejected:
        why = f"({rejected[0]}); JAX does not replace them: delete {folder}"
        lines.append(f"compilation cache: programs rejected on load and compiled again: {len(rejected)} {why}")
    if unwritten:
        lines.append(f"compilation cache: programs not written to {folder}: {len(unwritten)} ({unwritten[0]})")
    return len(rejected), lines


def compute_in_float32() -> None:
    """Compute products of float32 in float32 on a GPU too, whose default is TF32; JAX looks for devices now."""
    if jax.default_backend() != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")


def only_compiler(folder: Path) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """Return a context manager that locks a program while it is compiled, so that no other process compiles it too.

    A second process waits for the lock and then finds the program in the cache, in `folder`.
    """

    @contextlib.contextmanager
    def guard(program: str) -> Iterator[None]:
        with FileLock(folder / f"{program[:2]}.lock"):  # 256 locks: programs rarely share one
            yield

    return guard


def cached_compiler(runtime: RuntimeConfig) -> Compiler:
    """Return a compiler that uses the cache of compiled functions, if that is enabled."""
    compute_in_float32()
    folder = set_up_cache() if runtime.compile_cache else None
    return Compiler(time.perf_counter, only_compiler(folder) if folder else None)
