"""`make env`: uv installs the lock, or else pip; what is missing is one line, and nothing is left behind."""

import os
import shutil
import subprocess
import sys
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
    shift 2
    case "$*" in
    *config*) exit 1 ;;
    */uv.lock) grep -o '^[a-z].*==' "${8}" | sed 's/^/lock of /' >>"$CALLS" ;;
    esac
    echo "pip $*" | sed 's| /[^ ]*/| |' >>"$CALLS"
    case "$*" in
    *"$PIP_FAILS"*) echo "ERROR: pip found nothing" && exit 1 ;;
    */uv.lock) cp "$UV" "$(dirname "$0")/uv" ;;
    esac ;;
*version*) echo 3.12.1 ;;
esac
"""
WITHOUT_VENV = PYTHON.replace('case "$1', 'case "$*" in *ensurepip*) exit 1 ;; esac\ncase "$1', 1)
UV = """#!/bin/sh
# Writes down what uv is asked to install.
[ "$*" != "cache dir" ] || { echo "$HOME/cache" && exit; }
echo "uv $*" "${UV_DEFAULT_INDEX:-}" "${UV_LINK_MODE:-}" >>"$CALLS"
[ "$1" != venv ] || [ -z "${DOWNLOADED:-}" ] || "$DOWNLOADED" -m venv .venv
[ -z "${UV_FAILS:-}" ] || { printf 'Resolved\\n  × Failed to fetch\\n' && exit 1; }
"""
UV_COMPILE = """#!/bin/sh
# Resolves an extra: writes the blocks of the base before and after those of its lock into the last argument.
for output; do :; done
[ "$output" != locks/base.lock ] || exit 0
{ cat locks/base.lock && tail -n +2 "$output" && cat locks/base.lock; } >complete.lock && mv complete.lock "$output"
"""
INSTALLED_BY_UV = [
    "lock of uv==",
    "pip --disable-pip-version-check --retries 1 install --no-deps --require-hashes -r uv.lock",
    "uv pip install --python .venv/bin/python --no-deps --require-hashes -r locks/base.lock",
    "uv pip install --python .venv/bin/python --no-deps --no-build-isolation --editable .",
]
INSTALLED_BY_PIP = [
    "pip --disable-pip-version-check install --no-deps --require-hashes -r locks/base.lock",
    "pip --disable-pip-version-check install --no-deps --no-build-isolation --editable .",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "locks", tmp_path / "project" / "locks")
    for name in ("Makefile", "pyproject.toml"):
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
        start_new_session=True,  # a group of its own, to which Ctrl-C goes
    )
    lines = [line for line in (result.stdout + result.stderr).splitlines() if not line.startswith("make")]
    return result.returncode, lines


def script(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "setup: no no-such-python on the path; install Python 3.11 to 3.13 "),
        (SHIM, "python does not run"),
        (OLD, "python is 3.9.2, not 3.11 to 3.14"),
        (WITHOUT_VENV, "python has no venv module"),
    ],
)
def test_unusable_python_is_one_line(text: str, line: str, folder: Path) -> None:
    status, lines = make(folder, script(folder / "python", text) if text else "no-such-python")
    assert (status, len(lines)) == (2, 1)
    assert line in lines[0]


def run_with_fakes(folder: Path, python: str | None = None, **env: str) -> tuple[int, list[str], list[str]]:
    """Run `make env` with the Python above; return the exit status, what was said, and what was to be installed."""
    calls = folder / "calls"
    calls.write_text("")
    files = {"CALLS": str(calls), "UV": script(folder / "uv", UV), "PIP_FAILS": "nothing"}
    status, lines = make(folder, script(folder / "python", PYTHON) if python is None else python, **files | env)
    return status, lines, [" ".join(line.split()) for line in calls.read_text().splitlines()]


def test_uv_installs_the_lock_and_comes_from_it_itself(folder: Path) -> None:
    status, lines, calls = run_with_fakes(folder)
    assert (status, calls) == (0, INSTALLED_BY_UV)
    assert lines[0] == f"setup: creating .venv with Python 3.12.1 ({folder}/python), which PYTHON names"
    assert lines[1:3] == ["setup: installing uv", "setup: installing locks/base.lock with uv"]
    assert lines[3].startswith("setup: .venv is ready after ")
    assert run_with_fakes(folder) == (0, [], [])


@pytest.mark.parametrize("command", ["-m venv", "-m pip"])
def test_ctrl_c_is_one_line(command: str, folder: Path) -> None:
    presses = f'[ "$1 $2" != "{command}" ] || {{ echo Traceback >&2; kill -INT 0; sleep 9; }}\n'
    stopped = PYTHON.replace('case "$1 $2"', f'{presses}case "$1 $2"')
    _, lines, _ = run_with_fakes(folder, script(folder / "python", stopped))
    assert lines[-1] == "setup: stopped; the same command starts again"
    assert all(line.startswith("setup: ") for line in lines)
    assert not (folder / ".venv" / ".ready").exists()


@pytest.fixture
def path(folder: Path) -> str:
    """Return a path of one folder, which has no Python."""
    names = ["awk", "cp", "date", "dirname", "grep", "head", "ln", "make", "mkdir", "mktemp", "rm", "sed", "sh", "tail"]
    for name in names:
        script(folder / "bin" / name, f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')
    return str(folder / "bin")


FIRST = "the first of 3.13, 3.12, 3.11 and 3.14 on the path"


@pytest.mark.parametrize(
    ("pythons", "name", "line"),
    [
        ({"3": "3.13.2", "3.11": "3.11.7", "3.12": "3.12.1", "3.13": "3.13.2", "3.14": "3.14.0"}, "3.13", FIRST),
        ({"3": OLD, "3.11": "3.11.7", "3.12": WITHOUT_VENV, "3.13": SHIM}, "3.11", FIRST),
        ({"3": "3.14.0", "3.14": "3.14.0"}, "3.14", f"{FIRST}; 3.14 was not tried"),
        ({"": "3.12.1", "3": OLD}, "", FIRST),
    ],
)
def test_newest_tried_python_of_the_path_is_taken_and_named(
    pythons: dict[str, str], name: str, line: str, folder: Path, path: str
) -> None:
    for version, text in pythons.items():
        script(folder / "bin" / f"python{version}", text if "\n" in text else PYTHON.replace("3.12.1", text))
    status, lines, calls = run_with_fakes(folder, "", PATH=path)
    assert (status, calls) == (0, INSTALLED_BY_UV)
    assert lines[0] == f"setup: creating .venv with Python {pythons[name]} ({path}/python{name}), {line}"


def test_uv_is_asked_if_no_python_of_the_path_is_suitable(folder: Path, path: str) -> None:
    for name, text in {"python3.13": SHIM, "python3.12": WITHOUT_VENV, "python3": OLD}.items():
        script(folder / "bin" / name, text)
    missing = "no suitable Python on the path ({})".format(
        "python3.13 does not run; python3.12 has no venv module; python3 is 3.9.2, not 3.11 to 3.14"
    )
    status, lines, _ = run_with_fakes(folder, "", PATH=path)
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith(f"setup: {missing}, and no uv to download one; install Python 3.11 to 3.13 ")
    script(folder / "bin" / "uv", UV)
    status, lines, _ = run_with_fakes(folder, "", PATH=path, UV_FAILS="1")
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith(f"setup: {missing}, and uv failed:   × Failed to fetch; install ")
    status, lines, calls = run_with_fakes(folder, "", PATH=path, DOWNLOADED=script(folder / "downloaded", PYTHON))
    assert (status, calls) == (0, ["uv venv --seed --python >=3.11,<3.14 .venv", *INSTALLED_BY_UV])
    assert lines[0] == f"setup: created .venv with Python 3.12.1 from uv: {missing}"


def test_environment_keeps_its_python_until_another_is_named(folder: Path, path: str) -> None:
    for version in ("3.11.1", "3.12.1"):
        script(folder / "bin" / f"python{version[:4]}", PYTHON.replace("3.12.1", version))
    assert "Python 3.12.1" in run_with_fakes(folder, "", PATH=path)[1][0]
    script(folder / "bin" / "python3.13", PYTHON.replace("3.12.1", "3.13.1"))
    for python in ("", "python3.12", f"{path}/python3.12"):
        assert run_with_fakes(folder, python, PATH=path) == (0, [], [])
    status, lines, calls = run_with_fakes(folder, "python3.11", PATH=path)
    assert (status, calls) == (0, INSTALLED_BY_UV)
    assert lines[0] == f"setup: creating .venv with Python 3.11.1 ({path}/python3.11), which PYTHON names"
    assert run_with_fakes(folder, "python3.11", PATH=path) == (0, [], [])
    status, lines, _ = run_with_fakes(folder, script(folder / "shim", SHIM), PATH=path)
    assert (status, len(lines)) == (2, 1)


@pytest.mark.parametrize(
    ("env", "before", "why"),
    [
        ({"PIP_FAILS": "uv.lock"}, INSTALLED_BY_UV[:2], "ERROR: pip found nothing"),
        ({"UV_FAILS": "1"}, INSTALLED_BY_UV[:3], "  × Failed to fetch"),
    ],
)
def test_pip_installs_the_lock_if_uv_fails(env: dict[str, str], before: list[str], why: str, folder: Path) -> None:
    status, lines, calls = run_with_fakes(folder, **env)
    assert (status, calls) == (0, before + INSTALLED_BY_PIP)
    assert lines[-3:-1] == [
        f"setup: uv failed: {why}",
        "setup: installing locks/base.lock with pip, which takes a minute or two",
    ]


def test_failure_of_both_installers_is_one_line_and_leaves_no_ready_environment(folder: Path) -> None:
    status, lines, _ = run_with_fakes(folder, PIP_FAILS="")
    assert status == 2
    assert lines[-1] == "setup: pip failed: ERROR: pip found nothing (is a package index reachable?)"
    assert not (folder / ".venv" / ".ready").exists()


def test_environment_keeps_the_lock_of_gpu_or_cluster_until_another_is_named(folder: Path) -> None:
    ready, kept = folder / ".venv" / ".ready", folder / ".venv" / "kept"
    for variables, lock in (({"GPU": "1"}, "cuda"), ({}, "cuda"), ({"CLUSTER": "1"}, "cluster"), ({}, "cluster")):
        status, _, calls = run_with_fakes(folder, **variables)
        assert (status, calls[2]) == (0, INSTALLED_BY_UV[2].replace("base", lock))
        assert ready.read_text().splitlines() == [str(ready.parent.resolve()), f"locks/{lock}.lock"]
        assert run_with_fakes(folder, **variables) == (0, [], [])
        kept.touch()
        os.utime(ready, (0, 0))  # as if the lock changed since, which updates the environment
    assert kept.exists()


def test_make_lock_writes_only_what_an_extra_adds_to_the_base(folder: Path) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "uv").write_text(UV_COMPILE)
    (folder / "bin" / "uv").chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    subprocess.run(["sh", "locks/lock.sh"], cwd=folder, env=env, check=True, timeout=60)
    for name in ("base.lock", "cuda.lock", "cluster.lock"):
        assert (folder / "locks" / name).read_bytes() == (ROOT / "locks" / name).read_bytes()


@pytest.mark.slow
def test_moved_environment_is_created_again(folder: Path) -> None:
    env = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    environment = folder / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    (environment / ".ready").write_text(f"{environment.resolve()}\nlocks/base.lock\n")
    (environment / "of before").touch()
    assert make(folder, sys.executable, **env) == (0, [])
    moved = folder.rename(folder.with_name("moved"))
    status, lines = make(moved, sys.executable, **env)
    assert status == 2
    assert [line.split(": ")[1] for line in lines[1:3]] == ["installing uv", "uv failed"]
    assert "with pip" in lines[3]
    assert "is a package index reachable?" in lines[4]
    assert len(lines) == 5
    assert not (moved / ".venv" / ".ready").exists()
    assert not (moved / ".venv" / "of before").exists()
