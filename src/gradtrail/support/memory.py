"""How much memory there is, and whether what was compiled fits into it."""

import contextlib
import ctypes
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import psutil

from gradtrail.core.common.validation import ConfigError
from gradtrail.core.xla.compiler import CompiledFunction

_OWN_GROUP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def require_memory(key: str, batch_size: int, functions: Iterable[CompiledFunction], *, fixed_bytes: int) -> None:
    """Refuse a batch that does not fit, before any of the memory is taken.

    Args:
        key: of `params.yaml`, which chose the batch.
        functions: all that are compiled for it; the one that needs most counts.
        fixed_bytes: of what it needs, the part that does not depend on the batch, such as parameters and data.

    Raises:
        ConfigError: what it needs, what there is and what would fit, in one line.
    """
    largest = max(functions, key=lambda function: function.cost.total_bytes)
    needed, available = largest.cost.total_bytes, available_bytes()
    if needed <= available:
        return
    fits = int(batch_size * (available - fixed_bytes) / max(needed - fixed_bytes, 1))
    advice = f"{_round_down(fits):,} would fit" if fits >= 1 else "not even one example would fit: a smaller model may"
    raise ConfigError(
        f"{key} {batch_size} takes {_gib(needed)} GiB in {largest.name}; {_gib(available)} GiB are free; {advice}"
    )


def available_bytes() -> int:
    """Return the bytes that a device may still take: of a GPU's own memory, else of the machine's or its container's.

    Devices that share the memory of the machine share the answer out.
    """
    device = jax.local_devices()[0]
    limits = device.memory_stats() or {}
    if "bytes_limit" in limits:
        return int(limits["bytes_limit"]) - int(limits.get("bytes_in_use", 0))
    return min([psutil.virtual_memory().available, *_left_in_groups()]) // jax.local_device_count()


def release_memory() -> None:
    """Hand freed memory back to the system, which glibc does not do by itself after many compilations."""
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _left_in_groups() -> Iterator[int]:
    """Yield what each control group of this process leaves of its limit; its cache of files can be given back."""
    try:
        own = _OWN_GROUP.read_text().partition("0::/")[2].splitlines()[0]
    except (OSError, IndexError):
        return
    path = _CGROUPS / own
    for group in (path, *path.parents[: len(Path(own).parts)]):
        try:
            limit, used = (group / "memory.max").read_text(), int((group / "memory.current").read_text())
            files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit.strip() != "max":
            yield int(limit) - used + int(files.get("inactive_file", 0))


def _round_down(count: int) -> int:
    """Return a count with at most two digits that are not zero."""
    unit: int = 10 ** max(0, len(str(count)) - 2)
    return count // unit * unit


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f}"
