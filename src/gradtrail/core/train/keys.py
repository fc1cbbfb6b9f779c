"""Keys of the random numbers of a training, from its seeds and, in a private training, from a secret."""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from gradtrail.core.train.config import MemberSeeds


def keys_from_bits(bits: Any) -> Key[Array, "..."]:
    """Return keys from their bits, uint32 with a last axis of 2."""
    return jax.random.wrap_key_data(bits, impl="threefry2x32")


def keys_of(seeds: MemberSeeds, secret: str | None = None) -> Key[Array, " purposes"]:
    """Return a key for each purpose, made on the host: nothing is compiled for it. It is `jax.random.key` of its seed.

    The key of a private training's noise, and with a secret all keys except that of the initialization, are the first
    64 bits of SHA-256 of secret, purpose and seed, so that no two purposes share a key. With a secret the digest covers
    the seeds of all purposes: networks that differ in one of them share no noise.
    """
    by_purpose = {name: seed for name, seed in dataclasses.asdict(seeds).items() if seed is not None}
    bits: Any = np.array([[0, seed] for seed in by_purpose.values()], np.uint32)
    for number, (name, seed) in enumerate(by_purpose.items()):
        if name == "noise" or (secret is not None and name != "initialization"):
            seeds_text = seed if secret is None else ":".join(map(str, by_purpose.values()))
            text = f"{secret or ''}:{name}:{seeds_text}".encode(errors="surrogateescape")
            bits[number] = np.frombuffer(hashlib.sha256(text).digest()[:8], ">u4")
    return keys_from_bits(bits)
