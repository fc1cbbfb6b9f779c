"""Keeps the environment from changing results: removes what JAX, XLA and NumPy would read, or refuses it in one line.

`docs/guarantees.md` lists both. `artifacts.plotting` pins Matplotlib's settings.
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
from pathlib import Path
from typing import Annotated, Any, Literal

from gradtrail.core.config import Bounds, Count, Positive, config
from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import UserError
from gradtrail.support.paths import private_folder, root, store_uri
from gradtrail.support.ranks import COUNT, INDEX

KEPT = {  # which devices are found and how processes meet; memory of a GPU; logging
    *(
        "JAX_PLATFORMS",
        "JAX_PLATFORM_NAME",
        "JAX_CUDA_VISIBLE_DEVICES",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_ROCM_VISIBLE_DEVICES",
    ),
    *(COUNT, INDEX, "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_COORDINATOR_PORT"),
    *("XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"),
    *("JAX_DUMP_IR_TO", "JAX_EXPLAIN_CACHE_MISSES", "JAX_LOGGING_LEVEL", "JAX_LOG_COMPILES", "JAX_TRACEBACK_FILTERING"),
    "XLA_FLAGS",  # see `refuse_variables`
}
_READ_BY_LIBRARIES = re.compile(
    r"(JAX|XLA|PJRT|NPY|ONEDNN|DNNL)_.+|CHECK_VMA|EAGER_CONSTANT_FOLDING|FREETYPE_PROPERTIES|LIBTPU_INIT_ARGS"
    r"|MOCK_NUM_GPU_PROCESSES|NVIDIA_TF32_OVERRIDE"
)
_TRIED = (KEPT | {"CUDA_VISIBLE_DEVICES"}) - {COUNT, INDEX}  # by `require_jax`; not how processes meet
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
# Compiled code and YNNPACK's kernels then add in one order on every x86-64 with AVX2 and FMA. Products that YNNPACK
# does not take, as those of a gradient of weights, are oneDNN's, which reads a variable
_ANY_PROCESSOR = ("--xla_cpu_enable_platform_dependent_math=false", "--xla_cpu_max_isa=AVX2")
COMMON = "x86-64-v3"  # the name of these processors
_ONEDNN_LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
# With AVX-512, NumPy has other functions for logarithms and the like, which round otherwise
_NUMPY_LIMIT = {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"}
_OWN_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_force_host_platform_device_count")  # what the stage sets counts
_HARMLESS_FLAGS = (*_OWN_FLAGS, "--xla_dump_", "--xla_gpu_cuda_data_dir=")
_FLAG = re.compile(r"--xla_\w+(=\S*)?")
Seconds = Annotated[float, Bounds(above=0, at_most=1_000_000)]  # the system counts milliseconds in int32
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_START_JAX = "import jax; jax.numpy.ones(1).sum().item()"


@config
class EnvironmentConfig:
    """The section `environment` of `params.yaml`, which every stage that computes reads."""

    # Size of XLA's thread pool on a CPU, on any number of cores: long sums of products are split by it
    cpu_threads: Annotated[int, Bounds(at_least=1, at_most=1024)]
    xla_flags: tuple[str, ...]  # for XLA, such as `--xla_cpu_enable_fast_math=true`; may change results
    # `any`: the same bytes on every x86-64 with AVX2 and FMA. `native`: all instructions of the processor
    processor: Literal["any", "native"]

    @property
    def all_flags(self) -> tuple[str, ...]:
        """XLA's flags for the processor, then `xla_flags`."""
        return (*_ANY_PROCESSOR * (self.processor == "any" and platform.machine() == "x86_64"), *self.xla_flags)

    def check(self) -> None:
        for flag in self.xla_flags:
            if not _FLAG.fullmatch(flag):
                raise ValueError(f"xla_flags: entries must be like '--xla_name=value', got {flag!r}")
            if flag.startswith(_OWN_FLAGS):
                raise ValueError(f"xla_flags must leave {flag.partition('=')[0]} to the stage, got {flag!r}")


@config
class RuntimeConfig:
    """The section `runtime`: settings that cannot change an output; no DVC param, in no state key."""

    # Base URLs that serve the four files of the data set as `.gz`, tried in order; None for the data set's own
    mirrors: tuple[str, ...] | None
    openml: bool  # True to use OpenML, if it has the data set and no mirror delivers
    download_timeout_seconds: Seconds  # for one file from one mirror; a mirror that sends nothing is given up sooner
    steps_per_call: Count  # optimizer steps between two updates of the progress bar
    checkpoint_seconds: Positive  # time between two checkpoints of a training, from which it resumes after a kill
    # Epoch after which a training stops as if by Ctrl-C, to be resumed from its checkpoint; None to train to the end
    stop_after_epoch: Count | None
    join_seconds: Seconds  # longest wait of one of several processes for the others at the start
    compile_cache: bool  # True to keep compiled functions on disk, for the next run
    trace: bool  # True to record half a second of the stage's work with JAX's profiler, as an artifact
    tracking: bool  # True to log to MLflow
    # Name before those of MLflow's experiments, `data` and `models`; if empty, on a server the project's name
    experiment: str
    tracking_seconds: Seconds  # total time a stage waits for a tracking server; `gradtrail sync` uploads the rest
    system_metrics: bool  # True to log the usage of processor and memory, for stages longer than a minute
    # Address that gets a POST, or shell command that gets a line on stdin, if a training needs attention; or empty
    alert: str
    price_per_hour: Positive | None  # of the machine, for the metric `cost` of a training; None for no such metric
    copy_outs: bool  # True to log weights and parquet tables as artifacts, in addition to their digests
    checkify: tuple[Literal["nan", "div", "index"], ...]  # checks of every compiled function, in a second program
    transfer_guard: Literal["allow", "log", "disallow"]  # of implicit transfers in training steps
    thread_guard: bool  # True to refuse operations of several processes in other threads than that of the steps
    disable_jit: bool  # True to run every operation by itself; no outputs are written, since their bits would differ
    gpu_preallocate: bool  # True if JAX allocates most of a GPU's memory at start

    def check(self) -> None:
        if not re.fullmatch(r"[\w.-]*", self.experiment):
            raise ValueError(f"experiment must consist of letters, digits, '_', '.' and '-', got {self.experiment!r}")
        if "${" in self.alert:
            raise ValueError("alert must name a variable as $NAME: `dvc exp run -S` takes ${NAME} for a param")
        if self.checkify and self.disable_jit:
            raise ValueError("checkify must be empty with disable_jit, which compiles nothing to check")
        if self.transfer_guard == "disallow" and self.disable_jit:
            raise ValueError("transfer_guard must be allow or log with disable_jit, whose operations take host values")


def adapt_variables() -> None:
    """Remove the variables that libraries read and that are not in `KEPT`; before JAX and NumPy are imported.

    NumPy's functions are those for AVX2, also with `environment.processor: native`.

    Requests to this machine bypass a proxy of the environment, which would not find what listens on its loopback.
    """
    hosts = [*filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")).split(","))]
    direct = ",".join(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]))
    # Without a proxy nothing is set: the processes of a training would warn of `no_proxy`
    has_proxy = any(os.environ.get(name) for kind in _PROXIES for name in (kind, kind.upper()))
    os.environ |= {"no_proxy": direct, "NO_PROXY": direct} if has_proxy and hosts != ["*"] else {}
    for name in [name for name in os.environ if _READ_BY_LIBRARIES.fullmatch(name)]:
        if name not in KEPT:
            del os.environ[name]
    os.environ |= _NUMPY_LIMIT if platform.machine() == "x86_64" else {}


def refuse_variables(environment: EnvironmentConfig | None) -> None:
    """Raise UserError, one line, if a variable may change a result and cannot be removed or overridden.

    Also if the address of MLflow's store, or the number of a process, is not valid.

    Args:
        environment: None for a stage that does not compute, which ignores XLA's flags.
    """
    store_uri()
    for name in (COUNT, INDEX):
        if (value := os.environ.get(name)) and not value.isdecimal():
            raise UserError(f"{name}: must be a whole number, got {value!r}")
    if "glibc.cpu" in (value := os.environ.get("GLIBC_TUNABLES", "")):  # which the process has read already
        raise UserError(f"GLIBC_TUNABLES is set to {value!r}, which can change results; unset it")
    for flag in os.environ.get("XLA_FLAGS", "").split() if environment else ():
        if not flag.startswith(_HARMLESS_FLAGS) and environment and flag not in environment.all_flags:
            way = ", or list it in environment.xla_flags of params.yaml, so that it is part of the state"
            advice = f"unset it{way if _FLAG.fullmatch(flag) else ''}"
            raise UserError(f"XLA_FLAGS has {flag!r}, which may change results; {advice}")


def require_jax(flags: Sequence[str] = ()) -> None:
    """Raise UserError, in one line, if JAX cannot compute with the variables that are set.

    JAX reads most of them on import, and XLA ends the process if it does not know a flag, so another process tries
    them: once for the same values on the same machine.

    Args:
        flags: flags for XLA in `params.yaml`.
    """
    variables = {name: os.environ[name] for name in sorted(_TRIED) if os.environ.get(name)}
    if flags:
        variables["XLA_FLAGS"] = " ".join([variables.get("XLA_FLAGS", ""), *flags]).strip()
    if not variables:
        return
    key = json.dumps([platform.node(), sys.executable, variables])
    valid = root() / ".gradtrail" / "valid_environment.txt"
    if valid.is_file() and valid.read_bytes() == key.encode():
        return
    if error := _start_jax(variables):
        settings = ", ".join(f"{name}={value}" for name, value in variables.items())
        settings += " (with environment.xla_flags of params.yaml)" if flags else ""
        raise UserError(f"JAX does not start with {settings}: {error}")
    with contextlib.suppress(OSError), atomic_file(private_folder() / valid.name) as temporary:
        temporary.write_bytes(key.encode())


def _start_jax(variables: Mapping[str, str]) -> str:
    """Return the error of JAX if it computes in another process with these variables; empty if there is none."""
    rest = {name: os.environ[name] for name in os.environ if not _READ_BY_LIBRARIES.fullmatch(name)}
    env = rest | dict(variables) | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
    process = subprocess.run(
        [sys.executable, "-P", "-c", _START_JAX], env=env, capture_output=True, text=True, check=False
    )
    lines = process.stderr.strip().splitlines() or [f"its process ended with status {process.returncode}"]
    return lines[-1].rpartition("] ")[2] if process.returncode else ""


def set_up_jax(environment: EnvironmentConfig, runtime: RuntimeConfig) -> None:
    """Set XLA's flags and threads, one device on a CPU, and `disable_jit`; before JAX looks for devices.

    Also the allocation of GPU memory, for which `XLA_PYTHON_CLIENT_PREALLOCATE` takes precedence.
    """
    _jax().config.update("jax_disable_jit", runtime.disable_jit)
    set_cpu_devices(1)
    os.environ["PJRT_NPROC"] = str(environment.cpu_threads)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", str(runtime.gpu_preallocate).lower())
    flags = os.environ.get("XLA_FLAGS", "").split()
    other_flags = [flag for flag in flags if not flag.startswith(_OWN_FLAGS) and flag not in environment.all_flags]
    os.environ["XLA_FLAGS"] = " ".join([*other_flags, *environment.all_flags, _DETERMINISTIC])
    os.environ |= _ONEDNN_LIMIT if environment.processor == "any" else {}


def set_cpu_devices(count: int) -> None:
    """Split the processor into this many devices; must be called before JAX looks for devices."""
    _jax().config.update("jax_num_cpu_devices", count)


def processor_digest() -> str:
    """Return a digest of the processor's model and instruction sets, as far as the system reports them."""
    described = [platform.machine(), platform.processor(), sys.platform]
    # Linux on ARM has no model name, but lines such as `CPU part`
    lines = {line for line in cpuinfo().splitlines() if line.startswith(("model name", "flags", "Features", "CPU "))}
    return hashlib.sha256("\n".join([*described, *sorted(lines)]).encode()).hexdigest()[:12]


def has_common_bytes() -> bool:
    """Whether the processor has what `environment.processor: any` compiles for."""
    return {"avx2", "fma"} <= set(cpuinfo().partition("\n\n")[0].split())


def kind_of_processor(environment: EnvironmentConfig) -> str:
    """Return the kind of processors that compute the same bytes as this one: `COMMON`, or a digest of its model."""
    return COMMON if environment.processor == "any" and has_common_bytes() else processor_digest()


def cpuinfo() -> str:
    """Return `/proc/cpuinfo`; on macOS a line `model name` with the chip's name; empty if the system has neither."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return f"model name: {subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)}"
    return ""


def _jax() -> Any:
    """Return JAX, by name: stages that do not compute import this module too, and do not depend on JAX."""
    return importlib.import_module("jax")
