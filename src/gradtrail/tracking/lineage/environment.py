"""What computed a result: the machine, the packages and the switches that its bytes may depend on.

Equal inputs give equal bytes on one kind of machine with one set of versions; a run says which those were.
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

from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.versions import PATH as VERSIONS
from gradtrail.support.running_time import allowed_cores

_OF_GPUS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_VECTORS = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "asimd")  # of instruction sets, the one that says most first
_FEATURES = re.compile(
    r"amx_\w+|avx\w*|fma|f16c|sse4_2|asimd\w*|sve\w*|sme(\d|_\w+)?|bf16|i8mm"
)  # what a compiler uses
_DRIVER = re.compile(r"Kernel Module\D.*?\s(\d+\.[\d.]+)")
_stage_process: dict[str, Any] = {}  # what a tracker was told of its stage's process
_SWITCHES = re.compile(r"(XLA_|JAX_|OMP_|OPENBLAS_|MKL_).+")


def speak_for_stage(found: dict[str, Any]) -> None:
    """Describe the process of a stage as it described itself, and no longer this one, a tracker without JAX."""
    _stage_process.update(found)


def of_stage_process(what: str) -> Any:
    """Return `tags`, `origin` or `diff` of the stage's process, for which a tracker speaks; None in any other."""
    return _stage_process.get(what)


def environment() -> dict[str, Any]:
    """Return what computes in this process, as plain values: processor, memory, accelerators, packages, switches."""
    if _stage_process:
        return dict(_stage_process["environment"])
    processor = _processor()
    processor["features"] = sorted(name for name in processor["flags"] if _FEATURES.fullmatch(name))
    del processor["flags"]
    return {
        "machine": machine_key(),
        "processor": processor | _cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": _accelerators(),
        "driver": _driver(),
        "system": platform.platform(),
        "distribution": _distribution(),
        "python": platform.python_version(),
        "packages": _versions(),
        "switches": {name: value for name, value in sorted(os.environ.items()) if _SWITCHES.fullmatch(name)},
    }


def environment_tags() -> dict[str, str]:
    """Return the tags `machine` and `jax` of a run, to search by."""
    return {"machine": machine_key(), "jax": _versions().get("jax", "")}


def machine_key() -> str:
    """Return a short key of the kind of machine: processor, such as `AuthenticAMD-25-1-avx2`, and GPUs."""
    if _stage_process:
        return str(_stage_process["environment"]["machine"])
    found = _processor()
    vector = next((name for name in _VECTORS if name in found["flags"]), "")
    parts = [found[key] for key in ("vendor", "family", "model") if key in found] or [platform.machine()]
    return "-".join([*parts, *([vector] if vector else []), *(kind.replace(" ", "-") for kind in _accelerators())])


def _processor() -> dict[str, Any]:
    """Return architecture, name, vendor, family and model, and as `flags` all features that the system names."""
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError):
        first, *_ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
        lines = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    names = {"name": "model name", "vendor": "vendor_id", "family": "cpu family", "model": "model"}
    flags = f"{lines.get('flags', '')} {lines.get('Features', '')}".split()
    known = {key: lines[name] for key, name in names.items() if name in lines}
    return {"architecture": platform.machine(), "flags": flags} | known


def _cores() -> dict[str, Any]:
    """Return how many cores there are, on how many this process may run, and as how many its control group counts."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "cores_allowed": allowed_cores()}
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        found |= {} if quota == "max" else {"cores_quota": int(quota) / int(period)}
    return found


def _accelerators() -> list[str]:
    """Return the kinds of devices that JAX uses beside the processor; empty in a process that does not use JAX."""
    jax = sys.modules.get("jax")
    devices = jax.local_devices() if jax else []
    return sorted({str(device.device_kind) for device in devices if device.platform != "cpu"})


def _driver() -> dict[str, str]:
    """Return what drives the accelerators: the version of NVIDIA's kernel module, and what JAX's client says."""
    found = {}
    with contextlib.suppress(OSError):
        if told := _DRIVER.search(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")):
            found["nvidia"] = told[1]
    jax = sys.modules.get("jax")
    for device in jax.local_devices() if jax else []:
        if device.platform != "cpu":
            found[device.platform] = " ".join(str(device.client.platform_version).split())
    return found


def _distribution() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return ""


def _versions() -> dict[str, str]:
    found = {}
    for package in (*read_yaml(VERSIONS), *_OF_GPUS):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
