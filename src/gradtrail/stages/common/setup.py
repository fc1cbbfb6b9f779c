"""JAX's persistent compilation cache.

The cache is in `.gradtrail/xla/`, in one folder per version of jaxlib and kind of processor, because machine code for
another processor may not run. Cached code is executed as it is: do not copy the folder from a machine that you do not
trust.
"""

import contextlib
import re
import sys
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

_CACHE_FAULT = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '.*?': (.*)", re.DOTALL)


def set_up_cache() -> Path:
    """Enable the persistent compilation cache for every function; return its folder.

    JAX warns of every entry that it cannot read or write, such as on a full disk; the first warning becomes one line.
    """
    folder = private_folder() / "xla" / f"jaxlib-{jaxlib.version.__version__}-{processor_digest()}"
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = jax.config  # whose switches mypy does not know
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    show = warnings.showwarning

    def show_first_fault(message: Warning | str, *location: Any, **options: Any) -> None:
        if fault := _CACHE_FAULT.match(str(message)):
            reason = f"{one_line(fault[1])[:200]}; results are unaffected, and the folder may be deleted"
            print(f"warning: {folder}: the compilation cache failed: {reason}", file=sys.stderr)
            warnings.filterwarnings("ignore", _CACHE_FAULT.pattern)
        else:
            show(message, *location, **options)

    warnings.showwarning = show_first_fault
    return folder


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
