"""Sets JAX up as `runtime` asks, before it looks for devices. Without a GPU only the debug switches count."""

import os

import jax

from gradtrail.io.runtime import RuntimeConfig


def set_up_jax(runtime: RuntimeConfig) -> None:
    """Apply the debug switches and the settings of a GPU; what the environment says already has precedence."""
    jax.config.update("jax_debug_nans", runtime.debug_nans)
    jax.config.update("jax_disable_jit", runtime.disable_jit)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", str(runtime.gpu_preallocate).lower())
    flags = os.environ.get("XLA_FLAGS", "")
    if runtime.gpu_deterministic and "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()


def memory_budget(runtime: RuntimeConfig) -> int:
    """Return the bytes that the temporary arrays of one pass over single examples' gradients may take on a device.

    On a CPU more than the caches hold is slower, and what the system hands out anew for every call much slower.
    """
    default = 24 if jax.default_backend() == "cpu" else 1024
    return 2**20 * (default if runtime.memory_budget_mib is None else runtime.memory_budget_mib)
