"""Similarity of the classes' gradients against its definition; sums on the host do not go through a BLAS.

The order of a BLAS depends on its kernel and on the number of its threads.
"""

import dataclasses
import itertools
import os
import platform
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from factories import ROOT

from gradtrail.core.gradients.analysis import _unit
from gradtrail.core.gradients.chunks import ChunkGradients, ClassStructure, class_structure
from gradtrail.core.noise_scale import from_chunks

GRADIENTS = np.random.default_rng(0).normal(size=(12, 7)) + 0.5
CLASSES = np.repeat([0, 1, 2], [5, 4, 3])


def structure(gradients: np.ndarray, classes: np.ndarray, num_classes: int = 3) -> ClassStructure:
    sums = np.stack([gradients[classes == label].sum(axis=0) for label in range(num_classes)])
    squares = np.array([np.sum(gradients[classes == label] ** 2) for label in range(num_classes)])
    return structure_of(sums @ sums.T, squares, np.bincount(classes, minlength=num_classes))


def structure_of(products: np.ndarray, squares: np.ndarray, sizes: np.ndarray) -> ClassStructure:
    """Return the structure of classes with one chunk each."""
    labels = np.arange(len(sizes))
    chunks = ChunkGradients(sums=np.zeros((len(sizes), 1)), classes=labels, sizes=sizes, chunk_of=labels)
    return class_structure(products, squares, chunks, len(sizes))


def test_class_structure_equals_its_definition() -> None:
    result = structure(GRADIENTS, CLASSES)
    means = [GRADIENTS[label == CLASSES].mean(axis=0) for label in range(3)]
    norms = [np.sqrt(np.mean(np.sum(GRADIENTS[label == CLASSES] ** 2, axis=1))) for label in range(3)]
    for one, other in itertools.product(range(3), repeat=2):
        cosine = means[one] @ means[other] / np.linalg.norm(means[one]) / np.linalg.norm(means[other])
        assert result.cosine[one, other] == pytest.approx(cosine)
        pairs = [
            GRADIENTS[i] @ GRADIENTS[j]
            for i in np.flatnonzero(one == CLASSES)
            for j in np.flatnonzero(other == CLASSES)
            if i != j
        ]
        assert result.coherence[one, other] == pytest.approx(np.mean(pairs) / norms[one] / norms[other])
    total = GRADIENTS.sum(axis=0)
    shares = [GRADIENTS[label == CLASSES].sum(axis=0) @ total / (total @ total) for label in range(3)]
    np.testing.assert_allclose(result.share, shares)
    assert result.share.sum() == pytest.approx(1)


@pytest.mark.parametrize("rounding", [1e-9, 0.0, -1e-9])
def test_classes_of_one_example_have_no_coherence_with_themselves(rounding: float) -> None:
    """The squares of sums and of norms are rounded differently, so that their difference is not exactly 0."""
    squares = np.array([4.0, 4.0, 9.0])
    products = np.array([[4 + rounding, 1, 2], [1, 4 - rounding, 2], [2, 2, 16]])
    result = structure_of(products, squares, np.array([1, 1, 2]))
    assert np.isnan(np.diag(result.coherence)[:2]).all()
    assert result.within == result.coherence[2, 2] == pytest.approx((16 - 9) / 2 / 4.5)
    alone = structure_of(products, squares, np.array([1, 1, 0]))
    assert np.isnan(alone.within)
    empty = structure(GRADIENTS[:6], CLASSES[:6], 3)
    assert np.isnan(empty.cosine[2]).all()
    assert np.isnan(empty.share).tolist() == [False, False, True]
    assert np.isfinite(empty.within)
    assert np.isfinite(empty.across)
    assert np.isnan(ClassStructure.unknown(3).across)


NUM_CHUNKS, NUM_CLASSES = 60, 6


def in_bits(*, blas: bool) -> list[str]:
    """All figures that are summed on the host, from random gradients; or a product that a BLAS sums."""
    rng = np.random.default_rng(0)
    sums, sizes = rng.normal(size=(NUM_CHUNKS, 20_001)).astype(np.float32), rng.integers(1, 99, NUM_CHUNKS)
    classes = np.repeat(np.arange(NUM_CLASSES), NUM_CHUNKS // NUM_CLASSES)
    chunks = ChunkGradients(sums=sums, classes=classes, sizes=sizes, chunk_of=np.repeat(np.arange(NUM_CHUNKS), sizes))
    result: list[Any] = [sums @ sums.T]
    if not blas:
        products, squares = chunks.products(), chunks.squares(rng.uniform(size=sizes.sum()).astype(np.float32))
        structure = dataclasses.asdict(class_structure(products, squares, chunks, NUM_CLASSES))
        noise = dataclasses.asdict(from_chunks(products, squares, sizes, classes, samples=500, seed=0))
        result = [products, _unit(np.sum(chunks.sums, axis=0)), structure, noise]
    return [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(result)]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a kernel of OpenBLAS for x86 is asked for")
def test_figures_do_not_depend_on_the_blas() -> None:
    script = "from test_chunks import in_bits; print(*in_bits(blas=True), *in_bits(blas=False), sep='\\n')"
    folders = (ROOT / "src", ROOT / "tests" / "support_code", ROOT / "tests" / "core" / "gradients")
    path = os.pathsep.join(map(str, folders))
    other = os.environ | {"PYTHONPATH": path, "OPENBLAS_CORETYPE": "Prescott", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=other, check=True, stdout=subprocess.PIPE, text=True)
    of_blas, *result = done.stdout.split()
    assert of_blas != in_bits(blas=True)[0], "else it shows nothing"
    assert result == in_bits(blas=False)


def test_no_number_of_threads_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        results.append(in_bits(blas=False))
    assert results[0] == results[1]
