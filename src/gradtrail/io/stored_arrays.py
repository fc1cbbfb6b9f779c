"""What lies in an Orbax checkpoint, opened array by array.

Orbax itself takes the memory that a checkpoint declares before it looks whether there is so much, and where files are
damaged it prints the faults of its threads. Out of scope: how arrays make a tree.
"""

import math
from pathlib import Path
from typing import Any

import tensorstore as ts

_METADATA = "/zarr.json"  # of an array, after its name
_READING = {"open": True, "fill_missing_data_reads": False}  # what is not there is not taken for zeros


def open_arrays(checkpoint: Path) -> dict[str, Any]:
    """Return all arrays of a checkpoint by name, as TensorStores; nothing but their metadata is read.

    Raises:
        ValueError: the files are damaged.
    """
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{checkpoint / 'state'}/"}}
    keys = [key.decode() for key in ts.KvStore.open(base).result().list().result()]
    names = [key.removesuffix(_METADATA) for key in keys if key.endswith(_METADATA)]
    specs = {name: {"driver": "zarr3", "kvstore": {**base, "path": f"{name}/"}, **_READING} for name in names}
    return {name: ts.open(spec, read=True).result() for name, spec in specs.items()}


def declared_bytes(array: Any) -> int:
    """Return what an array would take in memory, or a piece of it where that is larger."""
    layout = array.chunk_layout
    shapes = (array.shape, layout.read_chunk.shape or (), layout.write_chunk.shape or ())
    return max(math.prod(shape) for shape in shapes) * array.dtype.numpy_dtype.itemsize
