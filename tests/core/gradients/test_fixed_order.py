"""Sums on the host do not go through a BLAS, whose order depends on its kernel and on the number of its threads."""

import dataclasses
import os
import platform
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from factories import ROOT

from gradtrail.core.gradients.analysis import _class_structure, _unit
from gradtrail.core.gradients.chunks import ChunkGradients
from gradtrail.core.noise_scale import from_chunks

CHUNKS, CLASSES = 60, 6


def in_bits(*, blas: bool) -> list[str]:
    """All figures that are summed on the host, from random gradients; or a product that a BLAS sums."""
    rng = np.random.default_rng(0)
    sums, sizes = rng.normal(size=(CHUNKS, 20_001)).astype(np.float32), rng.integers(1, 99, CHUNKS)
    classes = np.repeat(np.arange(CLASSES), CHUNKS // CLASSES)
    chunks = ChunkGradients(sums=sums, classes=classes, sizes=sizes, chunk_of=np.repeat(np.arange(CHUNKS), sizes))
    result: list[Any] = [sums @ sums.T]
    if not blas:
        products, squares = chunks.products(), chunks.squares(rng.uniform(size=sizes.sum()).astype(np.float32))
        structure = dataclasses.asdict(_class_structure(chunks, products, squares, CLASSES))
        noise = dataclasses.asdict(from_chunks(products, squares, sizes, classes, samples=500, seed=0))
        result = [products, _unit(chunks.total()), structure, noise]
    return [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(result)]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a kernel of OpenBLAS for x86 is asked for")
def test_figures_do_not_depend_on_the_blas() -> None:
    script = "from test_fixed_order import in_bits; print(*in_bits(blas=True), *in_bits(blas=False), sep='\\n')"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "core" / "gradients")])
    other = os.environ | {"PYTHONPATH": path, "OPENBLAS_CORETYPE": "Prescott", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=other, check=True, stdout=subprocess.PIPE, text=True)
    of_blas, *result = done.stdout.split()
    assert of_blas != in_bits(blas=True)[0], "else it shows nothing"
    assert result == in_bits(blas=False)


@pytest.mark.parametrize("threads", [1, 3, None])
def test_no_number_of_threads_changes_a_bit(threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_bits(blas=False)
    monkeypatch.setattr(os, "cpu_count", lambda: threads)
    assert in_bits(blas=False) == expected
