"""How busy the NVIDIA GPU is, by NVML."""

import contextlib
import importlib
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """The use of a GPU by all processes."""

    utilization: float  # share of the last moments in which a kernel ran
    memory_bytes: int


def gpu_use() -> GpuUse | None:
    """Return the use of the first GPU that this process may use; None without one, or without `nvidia-ml-py`."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    with contextlib.suppress(Exception):
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        is_name = first.startswith("GPU-")
        gpu = nvml.nvmlDeviceGetHandleByUUID(first) if is_name else nvml.nvmlDeviceGetHandleByIndex(int(first or 0))
        utilization, memory = nvml.nvmlDeviceGetUtilizationRates(gpu), nvml.nvmlDeviceGetMemoryInfo(gpu)
        return GpuUse(utilization=utilization.gpu / 100, memory_bytes=memory.used)
    return None
