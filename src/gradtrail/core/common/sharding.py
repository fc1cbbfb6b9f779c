"""Work on a batch shared out over devices: each takes a part, and the sums are added up."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from gradtrail.core.common.validation import ConfigError

AXIS = "data"


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of one axis over `devices`, by default all of this process."""
    devices = devices or jax.local_devices()
    return jax.make_mesh((len(devices),), (AXIS,), (AxisType.Auto,), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of what every device has whole."""
    return NamedSharding(mesh, P())


def over_batch(mesh: Mesh) -> NamedSharding:
    """Return the sharding of what has a leading axis of rows, of which every device has its part."""
    return NamedSharding(mesh, P(AXIS))


def with_sharding(abstract: Any, sharding: NamedSharding) -> Any:
    """Return a pytree of abstract arrays that lie as `sharding` says."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract)


def check_divisible(batch_size: int, mesh: Mesh, name: str) -> None:
    """Raise ConfigError, in one line that begins with `name`, unless a batch goes evenly over the devices."""
    if batch_size % mesh.size:
        raise ConfigError(f"{name} must be a multiple of the number of devices, {mesh.size}, got {batch_size}")


def data_parallel(function: Callable[..., tuple[PyTree, PyTree]], mesh: Mesh) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return `function` with its batch shared out over the devices of `mesh`.

    Args:
        function: whole, batch → a pytree of sums over the batch, and one of rows in the batch's order. It is called
            for each device's part.
        mesh: with one device, `function` is returned as it is.
    """
    if mesh.size == 1:
        return function

    def work(whole: Any, batch: Any) -> tuple[PyTree, PyTree]:
        sums, rows = function(whole, batch)
        return jax.lax.psum(sums, AXIS), rows

    return jax.shard_map(work, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=(P(), P(AXIS)), check_vma=False)
