"""Which requests a challenger gets: a share of the ids, and always the same ids."""

import hashlib

BITS = 53  # of a float


def position(request_id: str, salt: str = "") -> float:
    """Return the place of an id in [0, 1): uniform over ids, the same in every process and on every machine.

    It is made of sha256's first 53 bits, all that a float holds; Python's own `hash` differs from process to process.

    Args:
        request_id: a client's id where it sends one, so that all of its requests fall on one side.
        salt: another one gives another, independent split of the same ids.
    """
    digest = hashlib.sha256(f"{salt}\0{request_id}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - BITS)) / 2**BITS


def in_canary(request_id: str, share: float, salt: str = "") -> bool:
    """Whether an id is in the share; who is in a share is in every larger one, so that a canary can be widened.

    Args:
        request_id: as of `position`.
        share: of the ids, from 0 to 1.
        salt: as of `position`.
    """
    return position(request_id, salt) < share
