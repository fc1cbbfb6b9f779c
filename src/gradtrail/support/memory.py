"""How much memory is free, and whether what was compiled fits into it."""

from collections.abc import Iterable
from pathlib import Path

import jax
import psutil

from gradtrail.core.config import ConfigError
from gradtrail.core.xla.compiler import CompiledFunction

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes, or `max`


def require_memory(key: str, batch_size: int, functions: Iterable[CompiledFunction], *, fixed_bytes: int) -> None:
    """Refuse a batch for which compiled functions do not fit, before any of the memory is allocated.

    The error names the key of `params.yaml` that sets the batch size, and the size that would fit. `fixed_bytes` is the
    memory that does not depend on the batch, such as that of parameters and data.
    """
    largest = max(functions, key=lambda function: function.cost.total_bytes)
    needed, available = largest.cost.total_bytes, available_bytes()
    if needed > available:
        fits = int(batch_size * (available - fixed_bytes) / max(needed - fixed_bytes, 1))
        unit = 10 ** max(0, len(str(fits)) - 2)  # two digits that are not zero
        size = f"{fits // unit * unit:,} would fit"
        advice = size if fits >= 1 else "not even one example would fit: a smaller model may"
        raise ConfigError(
            f"{key} {batch_size} takes {_gib(needed)} GiB in {largest.name}; {_gib(available)} GiB are free; {advice}"
        )


def require_memory_for_model(stage: str, functions: Iterable[CompiledFunction], *, host_bytes: int) -> None:
    """Refuse a model for which a stage, whose batches follow from the model, does not fit.

    `host_bytes` are those of the arrays that the stage holds on the host while it calls the compiled functions.
    """
    on_device, on_host = max(function.cost.total_bytes for function in functions), host_bytes
    if _bytes_left_on_device() is None:  # then all devices use the memory of the host
        on_device, on_host = 0, host_bytes + jax.local_device_count() * on_device
    for needed, available in ((on_host, _bytes_left_on_host()), (on_device, available_bytes())):
        if needed > available:
            raise ConfigError(
                f"{stage} takes {_gib(needed)} GiB with this model; {_gib(available)} GiB are free; "
                "a smaller model may fit"
            )


def available_bytes() -> int:
    """Return the bytes that are free for one device: of a GPU's own memory, else its share of the host's."""
    on_device = _bytes_left_on_device()
    return _bytes_left_on_host() // jax.local_device_count() if on_device is None else on_device


def _bytes_left_on_device() -> int | None:
    """Return the free bytes of the first device's own memory; None if it uses the host's."""
    limits = jax.local_devices()[0].memory_stats() or {}
    return int(limits["bytes_limit"]) - int(limits.get("bytes_in_use", 0)) if "bytes_limit" in limits else None


def _bytes_left_on_host() -> int:
    available = int(psutil.virtual_memory().available)
    limit = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return available if limit == "max" else min(available, int(limit) - psutil.Process().memory_info().rss)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f}"
