"""How long this process has been running, its peak memory, and the cores that it may use."""

import contextlib
import os
import resource
import sys
import time
from pathlib import Path

import psutil


def seconds_running() -> float:
    """Return the seconds since this process began, to about a hundredth."""
    began = psutil.Process().create_time()
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux gives the boot in whole seconds, which cancel out
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (began - psutil.boot_time())
    return time.time() - began


def peak_memory_bytes() -> int:
    """Return the largest resident set that this process had."""
    with contextlib.suppress(OSError, IndexError):  # Linux: `getrusage` includes the process that started this one
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def allowed_cores() -> int:
    """Return the number of cores that this process may use; macOS cannot restrict them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
