"""Pins every environment setting that can change results, and refuses those that it cannot pin.

`docs/guarantees.md` lists what is pinned and what is refused. `artifacts.plotting` pins Matplotlib's settings.
"""

import contextlib
import hashlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.core.common.validation import check
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.support.errors import UserError
from gradtrail.support.paths import private_folder, root, store_uri
from gradtrail.support.ranks import COUNT, INDEX

PINNED: Mapping[str, Any] = {  # JAX's own defaults; the variables of these names have no effect
    "check_vma": False,
    "eager_constant_folding": False,
    "jax_allow_f16_reductions": True,
    "jax_compilation_cache_dir": None,
    "jax_compiler_enable_remat_pass": True,
    "jax_custom_vjp3": False,
    "jax_debug_infs": False,
    "jax_default_device": None,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_bwd_checks": False,
    "jax_disable_most_optimizations": False,
    "jax_enable_custom_prng": False,
    "jax_enable_pgle": False,
    "jax_enable_x64": False,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_explicit_x64_dtypes": "warn",
    "jax_high_dynamic_range_gumbel": False,
    "jax_legacy_prng_key": "allow",
    "jax_memory_fitting_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_optimization_level": "UNKNOWN",
    "jax_random_seed_offset": 0,
    "jax_remat3": False,
    "jax_scan3": False,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_threefry_partitionable": True,
    "jax_use_direct_linearize": True,
    "jax_use_shardy_partitioner": True,
}
HARMLESS = frozenset(  # logging, checking, caching, which devices are found, and how processes meet
    {
        "JAX_CHECK_TRACER_LEAKS",
        "JAX_COMPILATION_CACHE_MAX_SIZE",
        "JAX_COMPILER_DETAILED_LOGGING_MIN_OPS",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_COORDINATOR_PORT",
        "JAX_CUDA_VISIBLE_DEVICES",
        "JAX_DEBUG_KEY_REUSE",
        "JAX_DEBUG_LOG_MODULES",
        "JAX_DEBUG_NANS",  # set from `runtime`, as is the next
        "JAX_DISABLE_JIT",
        "JAX_DISTRIBUTED_DEBUG",
        "JAX_DUMP_IR_MODES",
        "JAX_DUMP_IR_TO",
        "JAX_ENABLE_CHECKS",
        "JAX_ENABLE_COMPILATION_CACHE",
        "JAX_EXPLAIN_CACHE_MISSES",
        "JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_LOGGING_LEVEL",
        "JAX_LOG_CHECKPOINT_RESIDUALS",
        "JAX_LOG_COMPILES",
        "JAX_NUM_CPU_DEVICES",  # set by the stage
        "JAX_NUM_PROCESSES",
        "JAX_PARTITION_INDEX",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
        "JAX_PLATFORMS",
        "JAX_PLATFORM_NAME",
        "JAX_PROCESS_ID",
        "JAX_RAISE_PERSISTENT_CACHE_ERRORS",
        "JAX_ROCM_VISIBLE_DEVICES",
        "JAX_SLICE_INDEX",
        "JAX_TRACEBACK_FILTERING",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT",
        "JAX_TRANSFER_GUARD",
        "JAX_VERSION",
    }
)
_JAX_VARIABLES = re.compile(r"JAX_.+|CHECK_VMA|EAGER_CONSTANT_FOLDING|MOCK_NUM_GPU_PROCESSES|LIBTPU_INIT_ARGS")
_LIBRARY_VARIABLES = {  # read before a stage starts; name → what of its value can change a bit
    "FREETYPE_PROPERTIES": "",  # how Matplotlib draws letters
    "GLIBC_TUNABLES": "glibc.cpu",
    "NPY_DISABLE_CPU_FEATURES": "",
    "NPY_ENABLE_CPU_FEATURES": "",
    "NVIDIA_TF32_OVERRIDE": "",
}
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
_OWN_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_force_host_platform_device_count")  # what the stage sets counts
_HARMLESS_FLAGS = (*_OWN_FLAGS, "--xla_dump_", "--xla_gpu_cuda_data_dir=")
_FLAG = re.compile(r"--xla_\w+(=\S*)?")
_READ_BY_JAX = re.compile(
    rf"(?!JAX_COORDINATOR_|{COUNT}|{INDEX})({_JAX_VARIABLES.pattern}|XLA_.+|CUDA_VISIBLE_DEVICES)"
)
_PLATFORMS = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
_START_JAX = "import jax; jax.numpy.ones(1).sum().item(); print(*{device.platform for device in jax.devices()})"


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """The section `environment` of `params.yaml`, which every stage that computes reads.

    Attributes:
        cpu_threads: size of XLA's thread pool on a CPU, on any number of cores: long sums of products are split by it.
        xla_flags: flags that the stage sets for XLA, such as `--xla_cpu_enable_fast_math=true`; may change results.
    """

    cpu_threads: int
    xla_flags: tuple[str, ...]

    def __post_init__(self) -> None:
        check("cpu_threads", self.cpu_threads, at_least=1, at_most=1024)
        for flag in self.xla_flags:
            if not _FLAG.fullmatch(flag):
                raise ValueError(f"xla_flags: entries must be like '--xla_name=value', got {flag!r}")
            if flag.startswith(_OWN_FLAGS):
                raise ValueError(f"xla_flags must leave {flag.partition('=')[0]} to the stage, got {flag!r}")


def refuse_unknown_variables(config: EnvironmentConfig | None) -> None:
    """Raise UserError, one line, if a variable may change a result and can no longer be overridden.

    Also if the address of MLflow's store, or the number of a process, is not valid.

    Args:
        config: None for a stage that does not compute, which ignores JAX's and XLA's variables.
    """
    store_uri()
    for name in (COUNT, INDEX):
        if (value := os.environ.get(name)) and not value.isdecimal():
            raise UserError(f"{name}: must be a whole number, got {value!r}")
    for name, part in _LIBRARY_VARIABLES.items():
        if (value := os.environ.get(name)) and part in value:
            raise UserError(f"{name} is set to {value!r}, which can change results; unset it")
    if config is None:
        return
    allowed = HARMLESS | {name.upper() for name in PINNED}
    for name, value in sorted(os.environ.items()):
        if _JAX_VARIABLES.fullmatch(name) and value and name not in allowed:
            raise UserError(f"{name} is set to {value!r}, which may change results; unset it")
    for flag in os.environ.get("XLA_FLAGS", "").split():
        if not flag.startswith(_HARMLESS_FLAGS) and flag not in config.xla_flags:
            way = ", or list it in environment.xla_flags of params.yaml, so that it is part of the state"
            advice = f"unset it{way if _FLAG.fullmatch(flag) else ''}"
            raise UserError(f"XLA_FLAGS has {flag!r}, which may change results; {advice}")


def require_jax(flags: Sequence[str] = ()) -> None:
    """Raise UserError, in one line, if JAX cannot compute with the variables that are set.

    JAX reads most of them on import, and XLA ends the process if it does not know a flag, so another process tries
    them: once for the same values on the same machine.

    Args:
        flags: the flags for XLA in `params.yaml`.
    """
    variables = {name: value for name, value in sorted(os.environ.items()) if value and _READ_BY_JAX.fullmatch(name)}
    if flags:
        variables["XLA_FLAGS"] = " ".join([variables.get("XLA_FLAGS", ""), *flags]).strip()
    if not variables:
        return
    key = json.dumps([platform.node(), sys.executable, variables])
    valid = root() / ".gradtrail" / "valid_environment.txt"
    if valid.is_file() and valid.read_bytes() == key.encode():
        return
    if error := _start_jax(variables)[1]:
        settings = ", ".join(f"{name}={value}" for name, value in variables.items())
        settings += " (with environment.xla_flags of params.yaml)" if flags else ""
        other_variables = {name: value for name, value in variables.items() if name not in _PLATFORMS}
        if other_variables != variables and (platforms := _start_jax(other_variables)[0]):
            settings = ", ".join(f"{name}={variables[name]}" for name in _PLATFORMS if name in variables)
            error = f"JAX finds only {platforms} on this machine"
        raise UserError(f"JAX does not start with {settings}: {error}")
    with contextlib.suppress(OSError), atomic_file(private_folder() / valid.name) as temporary:
        temporary.write_bytes(key.encode())


def _start_jax(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return the platforms on which JAX computes in another process with these variables, or its error."""
    environment = {name: value for name, value in os.environ.items() if not _READ_BY_JAX.fullmatch(name)}
    env = environment | dict(variables) | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
    process = subprocess.run([sys.executable, "-c", _START_JAX], env=env, capture_output=True, text=True, check=False)
    lines = process.stderr.strip().splitlines() or [f"its process ended with status {process.returncode}"]
    return (process.stdout.strip(), "") if process.returncode == 0 else ("", lines[-1].rpartition("] ")[2])


def set_up_jax(config: EnvironmentConfig, runtime: RuntimeConfig) -> None:
    """Set every switch of JAX and XLA that can change a bit, regardless of the environment; one device on a CPU.

    Also the debug switches, and the allocation of GPU memory, for which `XLA_PYTHON_CLIENT_PREALLOCATE` takes
    precedence. Must be called before JAX looks for devices.
    """
    switches = {**PINNED, "jax_debug_nans": runtime.debug_nans, "jax_disable_jit": runtime.disable_jit}
    for name, value in switches.items():
        _jax().config.update(name, value)
    set_cpu_devices(1)
    os.environ["PJRT_NPROC"] = str(config.cpu_threads)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", str(runtime.gpu_preallocate).lower())
    flags = os.environ.get("XLA_FLAGS", "").split()
    other_flags = [flag for flag in flags if not flag.startswith(_OWN_FLAGS) and flag not in config.xla_flags]
    os.environ["XLA_FLAGS"] = " ".join([*other_flags, *config.xla_flags, _DETERMINISTIC])


def set_cpu_devices(count: int) -> None:
    """Split the processor into this many devices; must be called before JAX looks for devices."""
    _jax().config.update("jax_num_cpu_devices", count)


def processor_digest() -> str:
    """Return a digest of the processor's model and instruction sets, as far as the system reports them."""
    described = [platform.machine(), platform.processor(), sys.platform]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:12]


def uses_jax() -> bool:
    """Return whether this process has imported JAX."""
    return "jax" in sys.modules


def _jax() -> Any:
    """Return JAX, by name: stages that do not compute import this module too, and do not depend on JAX."""
    return importlib.import_module("jax")
