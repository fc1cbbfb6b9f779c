"""Sets JAX up as `runtime` asks, before it looks for devices. Without a GPU only the debug switches count.

JAX's persistent compilation cache, so that the second run of a stage compiles nothing.

It lies in `.gradtrail/xla/`, in a folder for each version of jaxlib and kind of processor: machine code of another one
may not run. It is trusted as code is, so it is no DVC out, and nobody should carry it to another machine.
"""

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from filelock import FileLock
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.support.paths import private_folder


def set_up_jax(runtime: RuntimeConfig) -> None:
    """Apply the debug switches and the settings of a GPU; what the environment says already has precedence."""
    jax.config.update("jax_debug_nans", runtime.debug_nans)
    jax.config.update("jax_disable_jit", runtime.disable_jit)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", str(runtime.gpu_preallocate).lower())
    flags = os.environ.get("XLA_FLAGS", "")
    if runtime.gpu_deterministic and "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()


def set_up_cache() -> Path:
    """Let JAX keep all machine code; return the folder."""
    folder = private_folder() / "xla" / f"jaxlib-{jaxlib.version.__version__}-{_processor()}"
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = jax.config  # whose switches mypy does not know
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


@contextlib.contextmanager
def cache_disabled() -> Iterator[None]:
    """Let JAX compile what the block asks for as if nothing were kept, and keep none of it: to time it as it is."""
    config: Any = jax.config  # whose switches mypy does not know
    enabled = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    reset_cache()  # else JAX would not look at the switch again
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", enabled)
        reset_cache()


def only_compiler(folder: Path) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """Return what holds the lock of a program while it is compiled: a second process waits, and finds it in the cache.

    Args:
        folder: of the cache.
    """

    @contextlib.contextmanager
    def guard(program: str) -> Iterator[None]:
        lock = FileLock(folder / f"{program[:2]}.lock")  # 256 of them: programs that share one seldom meet
        with lock:
            yield

    return guard


def _processor() -> str:
    """Return a digest of what the processor can do, by its own account where the system tells."""
    described = [platform.machine(), platform.processor(), sys.platform]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:12]
