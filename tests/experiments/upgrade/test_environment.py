"""`gradtrail upgrade`: which versions it accepts, how it resolves the lock, and what it reports; uv is played."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from factories import ROOT
from projects import finished_project

from gradtrail.experiments.upgrade import environment
from gradtrail.experiments.upgrade.environment import read_pins, resolve
from gradtrail.experiments.upgrade.main import SEEDS, bits
from gradtrail.support.errors import UserError

LOCK = """alpha==1.0 \\
    --hash=sha256:aa
    # via gradtrail (pyproject.toml)
jax==0.10.2 \\
    --hash=sha256:bb \\
    --hash=sha256:cc
    # via
    #   flax
    #   gradtrail (pyproject.toml)
jaxlib==0.10.2 \\
    --hash=sha256:dd
    # via jax
zeta==1.0 ; python_full_version < '3.12' \\
    --hash=sha256:ee
zeta==2.0 ; python_full_version >= '3.12' \\
    --hash=sha256:ff
"""
PYPROJECT = """[project]
name = "gradtrail"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["alpha>=1", "jax>=0.10.2", "jaxlib>=0.10.2", "zeta>=1 ; sys_platform != 'win32'"]
[project.optional-dependencies]
dev = ["ruff"]
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("locks").mkdir()
    Path("locks/base.lock").write_text(LOCK)
    Path("pyproject.toml").write_text(PYPROJECT)
    Path("scratch").mkdir()
    return tmp_path


def played(monkeypatch: pytest.MonkeyPatch, answer: Callable[[list[str]], str]) -> list[list[str]]:
    """Let `uv pip compile` append what `answer` says to the lock, or fail; return the dependencies of each call."""
    calls: list[list[str]] = []

    def compile_lock(folder: Path) -> None:
        calls.append(tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"])
        lock = folder / "base.lock"
        lock.write_text(lock.read_text() + answer(calls[-1]))

    monkeypatch.setattr(environment, "_compile", compile_lock)
    return calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jax"], "jax: must be PACKAGE==VERSION, such as"),
        (["jax>=1"], "jax>=1: must be"),
        (["jax==1; rm"], "must be"),
        (["jaxs==1.0"], "locks/base.lock has no package jaxs; did you mean 'jax'?"),
        (["jax==0.10.2"], "locks/base.lock has this already"),
    ],
)
def test_invalid_version_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        read_pins(words)
    assert message in str(raised.value)


def test_other_packages_keep_their_hashes_and_jaxlib_follows_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = played(
        monkeypatch, lambda _: "jax==0.11.0 \\\n    --hash=sha256:gg\njaxlib==0.11.0 \\\n    --hash=sha256:hh\n"
    )
    resolved = resolve({"jax": "0.11.0"}, Path("scratch"))
    assert len(calls) == 1
    assert calls[0][-1] == "jax==0.11.0"
    assert resolved.bounds == ()
    assert resolved.versions == {"jax": ("0.10.2", "0.11.0"), "jaxlib": ("0.10.2", "0.11.0")}
    text = resolved.lock.read_text()
    assert all(digest in text for digest in ("sha256:aa", "sha256:ee", "sha256:ff"))
    assert not any(digest in text for digest in ("sha256:bb", "sha256:cc", "sha256:dd"))


def test_bounds_that_refuse_the_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(dependencies: list[str]) -> str:
        if "jax>=0.10.2" in dependencies:
            raise UserError("uv: no solution")
        return "jax==0.10.1\njaxlib==0.10.1\n"

    calls = played(monkeypatch, answer)
    resolved = resolve({"jax": "0.10.1"}, Path("scratch"))
    assert resolved.bounds == ("jax>=0.10.2", "jaxlib>=0.10.2")
    assert calls[1] == ["alpha>=1", "jax", "jaxlib", "zeta>=1 ; sys_platform != 'win32'", "jax==0.10.1"]
    assert Path("locks/base.lock").read_text() == LOCK
    assert Path("pyproject.toml").read_text() == PYPROJECT


def test_error_of_uv_is_one_line_without_an_address() -> None:
    message = environment._uv_error(
        "warning: something\n  × No solution found when resolving dependencies:\n"
        "  ╰─▶ Because there is no version of jax==99 at https://user:secret@index.example/simple\n"
        "      your requirements are unsatisfiable.\nhint: try again\n"
    )
    assert message.startswith("No solution found when resolving dependencies: Because there is no version of jax==99")
    assert "example" not in message
    assert "\n" not in message


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


@pytest.mark.nightly
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
