"""Sums on the host have one order, however many threads a BLAS has."""

import dataclasses
from typing import Any

import jax
import numpy as np
from threadpoolctl import threadpool_limits

from gradtrail.core.gradients.analysis import _class_structure, _unit
from gradtrail.core.gradients.passes import ChunkGradients
from gradtrail.core.per_example.noise_scale import from_chunks

CHUNKS, CLASSES = 60, 6


def summed() -> list[Any]:
    """All figures that are summed on the host, from random gradients."""
    rng = np.random.default_rng(0)
    sums, sizes = rng.normal(size=(CHUNKS, 50_001)).astype(np.float32), rng.integers(1, 99, CHUNKS)
    classes = np.repeat(np.arange(CLASSES), CHUNKS // CLASSES)
    chunks = ChunkGradients(sums=sums, classes=classes, sizes=sizes, chunk_of=np.repeat(np.arange(CHUNKS), sizes))
    products, squares = chunks.products(), chunks.squares(rng.uniform(size=sizes.sum()).astype(np.float32))
    structure = dataclasses.asdict(_class_structure(chunks, products, squares, CLASSES))
    noise = dataclasses.asdict(from_chunks(products, squares, sizes, classes, samples=500, seed=0))
    return [products, _unit(chunks.total()), structure, noise]


def test_figures_do_not_depend_on_the_threads_of_a_blas() -> None:
    def in_bits(limit: int) -> list[bytes]:
        with threadpool_limits(limit):
            return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(summed())]

    assert in_bits(1) == in_bits(2) == in_bits(3)


def test_the_products_are_those_of_the_sums() -> None:
    sums = np.random.default_rng(0).normal(size=(7, 3000)).astype(np.float32)
    chunks = ChunkGradients(sums=sums, classes=np.zeros(7, int), sizes=np.ones(7, int), chunk_of=np.zeros(1, int))
    expected = sums.astype(np.float64) @ sums.astype(np.float64).T
    np.testing.assert_allclose(chunks.products(), expected, rtol=1e-12, atol=1e-9)
