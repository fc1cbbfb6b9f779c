"""`make env`: uv installs the lock, or else pip; what is missing is one line, and nothing is left behind."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from projects import ROOT

SHIM = "#!/bin/sh\necho not selected >&2\nexit 127\n"  # of pyenv, for a version that is not selected
OLD = "#!/bin/sh\necho 3.9.2\n"
PYTHON = """#!/bin/sh
# A Python whose environments write down what pip is asked to install.
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip")
    echo "pip $*" >>"$CALLS"
    case "$*" in
    *config*) exit 1 ;;
    *"$PIP_FAILS"*) echo "ERROR: pip found nothing" && exit 1 ;;
    */uv.lock) cp "$UV" "$(dirname "$0")/uv" ;;
    esac ;;
*version*) echo 3.12.1 ;;
esac
"""
WITHOUT_VENV = PYTHON.replace('case "$1', 'case "$*" in *ensurepip*) exit 1 ;; esac\ncase "$1', 1)
UV = """#!/bin/sh
# Writes down what uv is asked to install.
echo "uv $*" >>"$CALLS"
[ "$1" != venv ] || [ -z "${DOWNLOADED:-}" ] || "$DOWNLOADED" -m venv .venv
[ -z "${UV_FAILS:-}" ] || { printf 'Resolved\\n  × Failed to fetch\\n' && exit 1; }
"""


def script(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


class Folder:
    """A project without an environment, and a path with one folder, which has no Python."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.ready = folder / ".venv" / ".ready"
        shutil.copytree(ROOT / "locks", folder / "locks")
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        tools = ("awk", "cp", "date", "dirname", "find", "grep", "head", "make", "mkdir", "mktemp", "mv", "rm", "sh")
        for name in (*tools, "cat", "sleep", "tail"):
            script(self.bin / name, f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')

    def make_env(self, python: str = "", **env: str) -> tuple[int, list[str], list[str]]:
        """Run `make env`; return the exit status, what was said, and what uv or pip was to install."""
        (calls := self.folder / "calls").write_text("")
        given = {"CALLS": str(calls), "UV": script(self.folder / "uv", UV), "PIP_FAILS": "nothing", **env}
        result = subprocess.run(
            ["make", "env", f"PYTHON={python}"],
            cwd=self.folder,
            env={"PATH": str(self.bin), "HOME": str(self.folder), **given},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            start_new_session=True,  # a group of its own, to which Ctrl-C goes
        )
        lines = [line for line in (result.stdout + result.stderr).splitlines() if not line.startswith("make")]
        locks = [line for line in calls.read_text().splitlines() if "-r locks/" in line]
        assert all("--no-deps --require-hashes" in line for line in locks)
        return (
            result.returncode,
            lines,
            [f"{line.split()[0]} {line.partition('locks/')[2].split()[0]}" for line in locks],
        )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is not on the path; install Python 3.11 to 3.13 "),
        (SHIM, "does not run"),
        (OLD, "is 3.9.2, not 3.11 to 3.14"),
        (WITHOUT_VENV, "has no venv module"),
    ],
)
def test_unusable_python_is_one_line(text: str, fault: str, folder: Folder) -> None:
    if text:
        script(folder.bin / "python3.12", text)
    status, (line,), _ = folder.make_env("python3.12")
    assert status == 2
    assert line.startswith(f"setup: python3.12 {fault}")


@pytest.mark.parametrize(
    ("pythons", "name"),
    [
        ({"3": "3.13.2", "3.11": "3.11.7", "3.12": "3.12.1", "3.13": "3.13.2", "3.14": "3.14.0"}, "3.13"),
        ({"3": OLD, "3.11": "3.11.7", "3.12": WITHOUT_VENV, "3.13": SHIM}, "3.11"),
        ({"": "3.12.1", "3": OLD}, ""),
    ],
)
def test_newest_tried_python_of_the_path_installs_the_lock_once(
    pythons: dict[str, str], name: str, folder: Folder
) -> None:
    for version, text in pythons.items():
        script(folder.bin / f"python{version}", text if "\n" in text else PYTHON.replace("3.12.1", text))
    status, lines, installed = folder.make_env()
    assert (status, installed) == (0, ["uv base.lock"])
    assert lines[0] == f"setup: creating .venv with Python {pythons[name]} ({folder.bin}/python{name})"
    assert lines[1:3] == ["setup: installing uv", "setup: installing locks/base.lock with uv"]
    assert lines[3].startswith("setup: .venv is ready after ")
    assert folder.make_env() == (0, [], [])


def test_uv_is_asked_if_no_python_of_the_path_is_suitable(folder: Folder) -> None:
    for name, text in {"python3.13": SHIM, "python3.12": WITHOUT_VENV, "python3": OLD}.items():
        script(folder.bin / name, text)
    missing = "no suitable Python on the path ({})".format(
        "python3.13 does not run; python3.12 has no venv module; python3 is 3.9.2, not 3.11 to 3.14"
    )
    status, (line,), _ = folder.make_env()
    assert status == 2
    assert line.startswith(f"setup: {missing}, and no uv to download one; install Python 3.11 to 3.13 ")
    script(folder.bin / "uv", UV)
    status, (line,), _ = folder.make_env(UV_FAILS="1")
    assert status == 2
    assert line.startswith(f"setup: {missing}, and uv failed:   × Failed to fetch; install ")
    status, lines, installed = folder.make_env(DOWNLOADED=script(folder.folder / "downloaded", PYTHON))
    assert (status, installed) == (0, ["uv base.lock"])
    assert lines[0] == f"setup: created .venv with Python 3.12.1 from uv: {missing}"


def test_ctrl_c_is_one_line(folder: Folder) -> None:
    presses = '[ "$1 $2" != "-m pip" ] || { echo Traceback >&2; kill -INT 0; sleep 9; }\n'
    script(folder.bin / "python3", PYTHON.replace('case "$1 $2"', f'{presses}case "$1 $2"'))
    _, lines, _ = folder.make_env()
    assert lines[-1] == "setup: stopped; the same command starts again"
    assert all(line.startswith("setup: ") for line in lines)
    assert not folder.ready.exists()


@pytest.mark.parametrize(
    ("env", "why"), [({"PIP_FAILS": "uv.lock"}, "ERROR: pip found nothing"), ({"UV_FAILS": "1"}, "  × Failed to fetch")]
)
def test_pip_installs_the_lock_if_uv_fails(env: dict[str, str], why: str, folder: Folder) -> None:
    script(folder.bin / "python3", PYTHON)
    status, lines, installed = folder.make_env(**env)
    assert (status, installed[-1]) == (0, "pip base.lock")
    assert lines[-3] == f"setup: uv failed: {why}"
    assert lines[-2].startswith("setup: installing locks/base.lock with pip, ")


def test_failure_of_both_installers_is_one_line_and_leaves_no_ready_environment(folder: Folder) -> None:
    script(folder.bin / "python3", PYTHON)
    status, lines, _ = folder.make_env(PIP_FAILS="")
    assert status == 2
    assert lines[-1] == "setup: pip failed: ERROR: pip found nothing (is a package index reachable?)"
    assert not folder.ready.exists()


def test_environment_keeps_its_python_and_lock_until_another_is_named_or_it_is_moved(folder: Folder) -> None:
    for version in ("3.11.1", "3.12.1"):
        script(folder.bin / f"python{version[:4]}", PYTHON.replace("3.12.1", version))
    assert "Python 3.12.1" in folder.make_env()[1][0]
    script(folder.bin / "python3.13", PYTHON.replace("3.12.1", "3.13.1"))
    for python in ("", "python3.12", f"{folder.bin}/python3.12"):
        assert folder.make_env(python) == (0, [], [])
    assert "Python 3.11.1" in folder.make_env("python3.11")[1][0]
    assert folder.make_env() == (0, [], [])

    kept = folder.ready.with_name("kept")
    kept.touch()
    for variables, lock in (({"GPU": "1"}, "cuda"), ({}, "cuda"), ({"CLUSTER": "1"}, "cluster"), ({}, "cluster")):
        assert folder.make_env(**variables)[2] == [f"uv {lock}.lock"]
        assert folder.make_env(**variables) == (0, [], [])
        os.utime(folder.ready, (0, 0))  # as if the lock changed since, which updates the environment
    assert kept.exists()

    folder.ready.write_text(f"/elsewhere/.venv\n{folder.ready.read_text().splitlines()[1]}\n")
    assert folder.make_env()[0] == 0
    assert not kept.exists()
