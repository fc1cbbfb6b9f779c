"""Work on a batch shared out over devices: each takes a part, and the sums are added up."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from gradtrail.core.bounds import ConfigError

AXIS = "data"


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of one axis over `devices`, by default all of this process."""
    devices = devices or jax.local_devices()
    return jax.make_mesh((len(devices),), (AXIS,), (AxisType.Auto,), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of what every device has whole."""
    return NamedSharding(mesh, P())


def check_divisible(batch_size: int, mesh: Mesh, name: str) -> None:
    """Raise ConfigError, in one line that begins with `name`, unless a batch goes evenly over the devices."""
    if batch_size % mesh.size:
        raise ConfigError(f"{name} must be a multiple of the number of devices, {mesh.size}, got {batch_size}")


def summed_over_devices(function: Callable[..., PyTree], mesh: Mesh) -> Callable[..., PyTree]:
    """Return `function` with its batch shared out over the devices of `mesh`.

    Args:
        function: whole, batch → a pytree of sums over the batch. It is called for each device's part.
        mesh: with one device, `function` is returned as it is.
    """
    if mesh.size == 1:
        return function

    def add_up(whole: Any, batch: Any) -> PyTree:
        return jax.lax.psum(function(whole, batch), AXIS)

    return jax.shard_map(add_up, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False)
