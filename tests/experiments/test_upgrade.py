"""`gradtrail upgrade`: which versions it accepts, how it resolves the lock, and what it reports."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from factories import ROOT
from projects import finished_project

from gradtrail.experiments import upgrade
from gradtrail.experiments.upgrade import locked, read_pins, resolve
from gradtrail.support.errors import UserError

LOCK = """alpha==1.0 \\
    --hash=sha256:aa
    # via gradtrail (pyproject.toml)
jax==0.10.2 \\
    --hash=sha256:bb
zeta==1.0 ; python_full_version < '3.12' \\
    --hash=sha256:ee
zeta==2.0 ; python_full_version >= '3.12' \\
    --hash=sha256:ff
"""
PYPROJECT = """[project]
dependencies = ["alpha>=1", "jax>=0.10.2,<0.11", "jaxtyping>=0.3", "zeta>=1 ; sys_platform != 'win32'"]
[project.optional-dependencies]
dev = ["ruff"]
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("locks").mkdir()
    Path("locks/base.lock").write_text(LOCK)
    Path("pyproject.toml").write_text(PYPROJECT)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("jax", "jax: must be PACKAGE==VERSION, such as"),
        ("jax>=1", "jax>=1: must be"),
        ("jax==1; rm", "must be"),
        ("jaxs==1.0", "locks/base.lock has no package jaxs; did you mean 'jax'?"),
    ],
)
def test_invalid_version_is_one_line(word: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_pins([word])


def test_lock_begins_from_the_present_one_without_the_bounds_of_changed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(upgrade, "uv", lambda *arguments: commands.append(arguments))
    lock = resolve({"jax": "0.12.0"}, tmp_path / "new", Path("/python"))
    requirements = ["alpha>=1", "jaxtyping>=0.3", "zeta>=1 ; sys_platform != 'win32'", "ruff", "jax==0.12.0"]
    assert (tmp_path / "new/requirements.in").read_text().splitlines() == requirements
    assert locked(lock) == {"alpha": ["1.0"], "jax": ["0.10.2"], "zeta": ["1.0", "2.0"]}
    assert {"--generate-hashes", "/python", str(lock)} <= {*commands[0]}
    assert Path("locks/base.lock").read_text() == LOCK


def test_error_of_uv_is_one_line_without_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    message = "  × No solution found\n  ╰─▶ no version of jax==99 at https://user:secret@index.example/"
    uv.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    uv.chmod(0o755)
    (tmp_path / "python").symlink_to("/bin/false")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"^uv: No solution found.* no version of jax==99 at \(an index\)$") as raised:
        upgrade.uv("pip", "compile")
    assert "\n" not in str(raised.value)


def test_outputs_are_equal_only_with_equal_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(commit: str) -> SimpleNamespace:
        outs = [{"path": "results/a", "md5": "1"}, {"path": "models/b", "md5": commit}]
        return SimpleNamespace(lock={stage: {"outs": outs} for stage in upgrade._STAGES})

    monkeypatch.setattr(upgrade, "snapshot_of", snapshot)
    assert upgrade.equal_outputs("2", "3") == {"results/a": True, "models/b": False}


_SAME_VERSIONS = """
import re
import sys
from pathlib import Path
from gradtrail.experiments import upgrade

def make_environment(*arguments):
    if arguments[0] == "venv":
        into = Path(arguments[-1]) / "bin"
        into.mkdir(parents=True, exist_ok=True)
        (into / "python").write_text(f'#!/bin/sh\\nexec {sys.executable} "$@"\\n')
        (into / "python").chmod(0o755)

upgrade.uv = make_environment
upgrade.upgrade(("jax==0.0.1",), python=Path(sys.executable), seconds=1.0)
"""


@pytest.mark.nightly
def test_rehearsal_of_the_same_versions_reports_no_change_and_changes_no_file(tmp_path: Path) -> None:
    """The rehearsal end to end, in an environment that is the project's own."""
    project = finished_project().copy(tmp_path / "project")
    (project.folder / "locks").mkdir()
    for name in ("locks/base.lock", "pyproject.toml"):
        (project.folder / name).write_bytes((ROOT / name).read_bytes())
    project.commit("a lock")
    status = project.git("status", "--porcelain")
    output = project.python("-c", _SAME_VERSIONS)
    assert "programs of train: 0 of " in output
    assert "other bytes: none" in output
    assert "difference +0.0000" in output
    assert "× the time of A" in output
    assert project.git("status", "--porcelain") == status
