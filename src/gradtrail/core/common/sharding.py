"""Data parallelism: each device works on a part of the batch, and sums over the batch are all-reduced."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

AXIS = "data"


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Return a mesh with one axis, `data`, over `devices`."""
    return jax.make_mesh((len(devices),), (AXIS,), (AxisType.Auto,), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds completely."""
    return NamedSharding(mesh, P())


def over_batch(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays whose leading axis is split over the devices."""
    return NamedSharding(mesh, P(AXIS))


def with_sharding(abstract: Any, sharding: NamedSharding) -> Any:
    """Return a pytree of abstract arrays with a sharding."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract)


def data_parallel(function: Callable[..., tuple[PyTree, PyTree]], mesh: Mesh) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return `function` with its batch split over the devices of `mesh`.

    Args:
        function: (whole, batch) → (pytree of sums over the batch, pytree of rows in the batch's order); `whole` is
            replicated, every leaf of `batch` has the batch as its leading axis. Called once with each device's part.
        mesh: with one device, `function` itself is returned.
    """
    if mesh.size == 1:
        return function

    def work(whole: Any, batch: Any) -> tuple[PyTree, PyTree]:
        sums, rows = function(whole, batch)
        return jax.lax.psum(sums, AXIS), rows

    return jax.shard_map(work, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=(P(), P(AXIS)), check_vma=False)
