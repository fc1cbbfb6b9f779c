"""`make env`: what is missing is one line, and nothing is left behind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from projects import ROOT

OLD = """#!/bin/sh
# A Python that is too old: answers the version check as one would.
case "$2" in *platform*) echo 3.9.2; exit 0;; esac
exit 1
"""
WITHOUT_VENV = f"""#!/bin/sh
case "$2" in *venv*) exit 1;; esac
exec {sys.executable} "$@"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "tools", tmp_path / "project" / "tools")
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-cuda.lock"):
        shutil.copy(ROOT / name, tmp_path / "project")
    return tmp_path / "project"


def make(folder: Path, python: str, **env: str) -> tuple[int, list[str]]:
    """Run `make env`; return the exit status and what was said, less what make itself says of a failed target."""
    result = subprocess.run(
        ["make", "env", f"PYTHON={python}"],
        cwd=folder,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = [line for line in (result.stdout + result.stderr).splitlines() if not line.startswith("make")]
    return result.returncode, lines


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_no_python(folder: Path) -> None:
    status, lines = make(folder, "no-such-python")
    assert status == 2
    assert lines == [
        "setup: no no-such-python on the path; install Python 3.11 to 3.13, "
        "or name one: make PYTHON=/path/to/python3.12 ..."
    ]


def test_too_old(folder: Path) -> None:
    status, lines = make(folder, script(folder, OLD))
    assert status == 2
    assert len(lines) == 1
    assert "is 3.9.2, but 3.11 to 3.13 is needed" in lines[0]


def test_no_venv_module(folder: Path) -> None:
    status, lines = make(folder, script(folder, WITHOUT_VENV))
    assert status == 2
    assert len(lines) == 1
    assert "no venv module" in lines[0]


@pytest.mark.slow
def test_an_environment_that_came_from_elsewhere_is_made_anew_and_without_an_index_it_is_not(folder: Path) -> None:
    env = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    environment = folder / ".venv"
    environment.mkdir()
    (environment / ".ready").write_text(f"{environment.resolve()}\n")
    (environment / "of before").touch()
    assert make(folder, sys.executable, **env) == (0, [])
    moved = folder.rename(folder.with_name("moved"))
    status, lines = make(moved, sys.executable, **env)
    assert status == 2
    assert len(lines) == 2  # that it installs, and why it did not
    assert "setup: installing" in lines[0]
    assert "is a package index reachable?" in lines[1]
    assert not (moved / ".venv" / ".ready").exists()
    assert not (moved / ".venv" / "of before").exists()
