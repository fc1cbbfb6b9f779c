"""Assigns request ids to the challenger: a share of the ids, and always the same ids."""

import hashlib

_BITS = 53  # mantissa of a float


def position(request_id: str, salt: str = "") -> float:
    """Return the position of an id in [0, 1): uniform over ids, and the same in every process on every machine.

    It is made of the first 53 bits of the id's sha256; Python's own `hash` differs from process to process.

    Args:
        request_id: A client's id if it sends one, so that all of its requests are on one side.
        salt: Text that selects one of many independent splits of the same ids.
    """
    digest = hashlib.sha256(f"{salt}\0{request_id}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - _BITS)) / 2**_BITS


def is_in_canary(request_id: str, share: float, salt: str = "") -> bool:
    """Return whether an id is in the share; a larger share contains all ids of a smaller one.

    Args:
        request_id: A client's id, see `position`.
        share: Share of the ids, from 0 to 1.
        salt: Text that selects a split, see `position`.
    """
    return position(request_id, salt) < share
