"""`gradtrail upgrade`: what it says of bits, and what accepting takes."""

from pathlib import Path

import numpy as np
import pytest
from factories import ROOT
from projects import finished_project

from gradtrail.experiments.upgrade.main import SEEDS, bits


def weights(folder: Path, *, added: float = 0.0, dtype: str = "float32") -> Path:
    """Write the weights of every seed, the last of which differs."""
    folder.mkdir()
    for seed in SEEDS:
        kernel = np.full((2, 3), seed, dtype)
        kernel[1, 2] += added if seed == SEEDS[-1] else 0.0
        np.savez(folder / f"seed-{seed}.npz", kernel=kernel)
    return folder


def test_equal_bits_or_the_largest_difference_are_reported(tmp_path: Path) -> None:
    first = weights(tmp_path / "a")
    assert "the same bits, for 3 seeds" in bits(first, weights(tmp_path / "b"))
    assert "largest difference 0.5 (kernel, seed 2)" in bits(first, weights(tmp_path / "c", added=0.5))
    assert "largest difference nan (kernel, seed 2)" in bits(first, weights(tmp_path / "d", added=np.nan))
    assert "kernel is float64[2, 3], was float32[2, 3]" in bits(first, weights(tmp_path / "e", dtype="float64"))


_PLAYED = """
import sys
from pathlib import Path
from gradtrail.experiments.upgrade import main
from gradtrail.experiments.upgrade.environment import Resolved

def resolve(pins, folder):
    return Resolved(lock=folder / "base.lock", versions={"jax": ("1", "2")}, bounds=())

def install(lock, into):
    if sys.argv[1:]:
        python = lock.parent / "python"
        python.write_text("#!/bin/sh\\necho 'AttributeError: gone in this version' >&2; exit 1\\n")
        python.chmod(0o755)
        return python
    return Path(sys.executable)

main.resolve, main.install = resolve, install
main.upgrade(("jax==0.0.1",), seconds=1.0)
"""


@pytest.mark.slow
def test_rehearsal_of_the_same_versions_reports_no_change_and_changes_nothing(tmp_path: Path) -> None:
    """The rehearsal end to end, in an environment that is the project's own; uv is played."""
    project = finished_project().copy(tmp_path / "project")
    (project.folder / "locks").mkdir()
    for name in ("locks/base.lock", "pyproject.toml"):
        (project.folder / name).write_bytes((ROOT / name).read_bytes())
    project.commit("a lock")
    runs, status = project.runs(), project.git("status", "--porcelain")
    outs = {path: path.read_bytes() for path in (project.folder / "models").rglob("*") if path.is_file()}
    output = project.python("-c", _PLAYED)
    assert "programs: 0 changed" in output
    assert "costs: those of all functions within the gate's tolerances" in output
    assert "the same bits, for 3 seeds" in output
    assert "difference +0.0000" in output
    assert "× the time of A" in output
    assert "cp .gradtrail/upgrade/jax-0.0.1/base.lock locks/base.lock" in output
    assert (project.runs(), project.git("status", "--porcelain")) == (runs, status)
    assert {path: path.read_bytes() for path in outs} == outs
    broken = project.python("-c", _PLAYED, "broken", status=1)
    assert "jax-0.0.1: the project does not run with it: AttributeError: gone in this version" in broken
    assert not [*(project.folder / ".gradtrail/upgrade").iterdir()]
    assert not [*(project.folder / ".gradtrail/timed").iterdir()]
