"""What computed a result: the machine, the packages and the switches that its bytes may depend on.

Equal inputs give equal bytes on one type of machine with one set of versions; a run records both. With
`environment.processor: any`, all x86-64-v3 processors are one type.
"""

import contextlib
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from gradtrail.stages.common.environment import COMMON, EnvironmentConfig, cpuinfo, kind_of_processor
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.versions import VERSIONS, network_versions
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.running_time import allowed_cores

_GPU_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_VECTOR_INSTRUCTIONS = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "asimd")  # most specific first
_FEATURES = re.compile(  # of a processor that a compiler uses
    r"amx_\w+|avx\w*|fma|f16c|sse4_2|asimd\w*|sve\w*|sme(\d|_\w+)?|bf16|i8mm"
)
_DRIVER = re.compile(r"Kernel Module\D.*?\s(\d+\.[\d.]+)")
_SWITCHES = re.compile(r"(XLA_|JAX_|ONEDNN_|OMP_|OPENBLAS_|MKL_).+")


def environment() -> dict[str, Any]:
    """Return the processor, memory, accelerators, packages and switches of this process, as plain values."""
    processor, driver = _processor(), _DRIVER.search(_text("/proc/driver/nvidia/version"))
    processor["features"] = sorted(name for name in processor.pop("flags") if _FEATURES.fullmatch(name))
    return {
        "machine": machine_key(),
        "bytes": bytes_key(),
        "processor": processor | _cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": _accelerators(),
        "driver": driver[1] if driver else "",  # version of NVIDIA's kernel module
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": _versions(),
        "switches": {name: value for name, value in sorted(os.environ.items()) if _SWITCHES.fullmatch(name)},
    }


def machine_key() -> str:
    """Return a short key of the type of machine: processor, such as `AuthenticAMD-25-1-avx2`, and GPUs."""
    processor = _processor()
    vector = next((name for name in _VECTOR_INSTRUCTIONS if name in processor["flags"]), "")
    parts = [processor[key] for key in ("vendor", "family", "model") if key in processor]
    parts = parts or [processor.get("name", platform.machine())]
    return "-".join([*parts, *([vector] if vector else []), *_accelerators()]).replace(" ", "-")


def bytes_key() -> str:
    """Return the type of machines that make the bytes of this process: `COMMON`, or the one of `machine_key`."""
    is_common = kind_of_processor(load_section("environment", EnvironmentConfig)) == COMMON
    return COMMON if is_common and not _accelerators() else machine_key()


def _processor() -> dict[str, Any]:
    """Return architecture, name, vendor, family, model, and all features that the system names as `flags`."""
    first, *_ = cpuinfo().partition("\n\n")
    lines = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    names = {"model name": "name", "vendor_id": "vendor", "cpu family": "family", "model": "model"}
    names |= {"CPU implementer": "vendor", "CPU part": "model"}  # on ARM
    flags = f"{lines.get('flags', '')} {lines.get('Features', '')}".split()
    values = {key: lines[name] for name, key in names.items() if name in lines}
    return {"architecture": platform.machine(), "flags": flags} | values


def _cores() -> dict[str, Any]:
    """Return the number of cores, of those that this process may use, and the quota of its control group."""
    quota, *period = _text("/sys/fs/cgroup/cpu.max").split() or ["max"]
    limit = {} if quota == "max" else {"cores_quota": int(quota) / int(period[0])}
    return {"cores": os.cpu_count(), "cores_allowed": allowed_cores()} | limit


def _accelerators() -> list[str]:
    """Return the types of accelerators that JAX uses; empty in a process that does not use JAX."""
    jax = sys.modules.get("jax")
    devices = jax.local_devices() if jax else []
    return sorted({str(device.device_kind) for device in devices if device.platform != "cpu"})


def _text(path: str) -> str:
    """Return the text of a system file; empty if this system has none."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8")
    return ""


def _versions() -> dict[str, str]:
    versions = {}
    for package in (*read_yaml(VERSIONS), *network_versions(), *_GPU_PACKAGES):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
