"""Warns of arrays that are still on the devices at the end of a stage, which should have released them."""

import gc
import sys
from collections import Counter

_MIB = 2**20


def warn_of_live_arrays(stage: str) -> None:
    """Warn, in one line on stderr, of more than a MiB of arrays, which is more than JAX's own constants take."""
    if "jax" not in sys.modules:
        return
    gc.collect()
    arrays = sorted(sys.modules["jax"].live_arrays(), key=lambda array: -array.nbytes)
    total = sum(array.nbytes for array in arrays)
    if total > _MIB:
        counts = Counter(array.aval.str_short() for array in arrays)
        names = ", ".join(f"{count} of {kind}" for kind, count in list(counts.items())[:3])
        print(f"{stage}: warning: {total / _MIB:.1f} MiB of arrays are still allocated: {names}", file=sys.stderr)
