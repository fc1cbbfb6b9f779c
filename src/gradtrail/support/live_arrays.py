"""Warns of arrays that are still on the devices at the end of a stage, which should have released them."""

import gc
import sys
from collections import Counter

_LARGEST_BYTES = 2**20  # more than JAX's own constants take


def warn_of_live_arrays(stage: str) -> None:
    """Warn, in one line on stderr, of arrays on the devices that are still alive."""
    jax = sys.modules.get("jax")
    if jax is None:
        return
    gc.collect()
    alive = jax.live_arrays()
    num_bytes = sum(array.nbytes for array in alive)
    if num_bytes > _LARGEST_BYTES:
        kinds = Counter(array.aval.str_short() for array in sorted(alive, key=lambda array: -array.nbytes))
        names = ", ".join(f"{count} of {kind}" for kind, count in list(kinds.items())[:3])
        print(
            f"{stage}: warning: {num_bytes / 2**20:.1f} MiB of arrays are still allocated at the end: {names}",
            file=sys.stderr,
        )
