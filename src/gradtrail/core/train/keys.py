"""The keys that the random numbers of a training come from: those of its seeds and, of a private one, of a secret."""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key, UInt32

from gradtrail.core.train.config import MemberSeeds


def keys_of(seeds: MemberSeeds, secret: str | None = None) -> Key[Array, " purposes"]:
    """Return the same as `jax.random.key` of each seed; see `key_bits_of`."""
    return keys_from_bits(key_bits_of(seeds, secret))


def keys_from_bits(bits: Any) -> Key[Array, "..."]:
    """Return the keys that have these bits, uint32 with a last axis of 2."""
    return jax.random.wrap_key_data(bits, impl="threefry2x32")


def key_bits_of(seeds: MemberSeeds, secret: str | None = None) -> UInt32[np.ndarray, "purposes 2"]:
    """Return the bits of a key for each purpose, made on the host: nothing is compiled for it.

    That of the noise of a private training, and with a secret all but that of the initialization, are the first 64 bits
    of SHA-256 of the secret, the purpose and the seed: so no two purposes have a key in common. A secret's are of the
    seeds of all purposes: networks that differ in one of them have no noise in common.
    """
    named = {name: seed for name, seed in dataclasses.asdict(seeds).items() if seed is not None}
    bits: Any = np.array([[0, seed] for seed in named.values()], np.uint32)
    for number, (name, seed) in enumerate(named.items()):
        if name == "noise" or (secret is not None and name != "initialization"):
            of_seeds = seed if secret is None else ":".join(map(str, named.values()))
            text = f"{secret or ''}:{name}:{of_seeds}".encode(errors="surrogateescape")
            bits[number] = np.frombuffer(hashlib.sha256(text).digest()[:8], ">u4")
    found: np.ndarray = bits
    return found
