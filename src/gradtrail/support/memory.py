"""How much memory is free, and whether what was compiled fits into it."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import psutil

from gradtrail.core.config import ConfigError
from gradtrail.core.xla.compiler import CompiledFunction

_OWN_GROUP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def require_memory(key: str, batch_size: int, functions: Iterable[CompiledFunction], *, fixed_bytes: int) -> None:
    """Refuse a batch that does not fit, before any of the memory is allocated.

    Args:
        key: Key of `params.yaml` that sets the batch size.
        batch_size: Value of that key.
        functions: Functions compiled for that batch; the one that needs most memory counts.
        fixed_bytes: Part of the memory that does not depend on the batch, such as parameters and data.

    Raises:
        ConfigError: One line with the needed memory, the free memory, and the batch size that would fit.
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


def require_memory_for_model(stage: str, functions: Iterable[CompiledFunction], *, host_bytes: int) -> None:
    """Refuse a model whose analysis does not fit; the batches of such a stage follow from the model.

    Args:
        stage: Name of the stage that analyses it.
        functions: All functions compiled for it; the one that needs most memory counts.
        host_bytes: Bytes of arrays that the stage holds on the host while it calls them.

    Raises:
        ConfigError: One line with the needed and the free memory.
    """
    devices = jax.local_device_count()
    on_device, on_host = max(function.cost.total_bytes for function in functions), host_bytes
    if _bytes_left_on_device() is None:  # then all devices use the memory of the host
        on_device, on_host = 0, host_bytes + devices * on_device
    for needed, available in ((on_host, _bytes_left_on_host()), (on_device, available_bytes())):
        if needed > available:
            raise ConfigError(
                f"{stage} takes {_gib(needed)} GiB with this model; {_gib(available)} GiB are free; "
                f"a smaller model may fit"
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
    return min([psutil.virtual_memory().available, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes that each control group of this process leaves of its limit; its file cache counts as free."""
    try:
        own_group = _OWN_GROUP.read_text().partition("0::/")[2].splitlines()[0]
    except (OSError, IndexError):
        return
    path = _CGROUPS / own_group
    for group in (path, *path.parents[: len(Path(own_group).parts)]):
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
