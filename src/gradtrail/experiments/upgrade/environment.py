"""A scratch environment: the project's lock with some versions changed, resolved and installed by uv.

Nothing of the project is written, and no address of an index: uv's own settings, or else pip's, say where packages are.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradtrail.support.errors import UserError, one_line, suggestion

LOCK, PYPROJECT = Path("locks/base.lock"), Path("pyproject.toml")
_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==([0-9][\w.!+]*)")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_FOLLOWS = {"jaxlib": "jax"}  # whose version the first takes, unless it is named itself
_TIMEOUT_SECONDS = 1800
_LONGEST_LINE = 400  # characters


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A new lock.

    Attributes:
        lock: the file.
        versions: package → version before and after, of packages that differ; None for one that is not there.
        bounds: requirements of `pyproject.toml` that do not allow it.
    """

    lock: Path
    versions: Mapping[str, tuple[str | None, str | None]]
    bounds: tuple[str, ...]


def read_pins(words: Iterable[str]) -> dict[str, str]:
    """Return package → version; raise UserError for what is not `PACKAGE==VERSION` of a package of the lock."""
    known, found = locked(LOCK), dict[str, str]()
    for word in words:
        if not (match := _PIN.fullmatch(word)):
            raise UserError(f"{word}: must be PACKAGE==VERSION, such as jax==0.10.2")
        name = _normal(match[1])
        if name not in known:
            raise UserError(f"{word}: {LOCK} has no package {name}{suggestion(name, known)}")
        found[name] = match[2]
    if all(known[name] == version for name, version in found.items()):
        raise UserError(f"{', '.join(words)}: {LOCK} has just that already")
    return found


def locked(lock: Path) -> dict[str, str]:
    """Return package → version of a lock; of a package with several, for several systems, all."""
    found = dict[str, str]()
    try:
        text = lock.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{lock}: cannot be read: {error.strerror}") from None
    for name, version in re.findall(r"(?m)^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", text):
        found[name] = f"{found[name]}, {version}" if name in found else version
    return found


def resolve(pins: Mapping[str, str], folder: Path) -> Resolved:
    """Resolve the lock with some versions changed: others move only where they must, and keep their hashes.

    Raises:
        UserError: there is no such version, or no set of packages that fits; one line.
    """
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    loose = {name for name, leader in _FOLLOWS.items() if leader in pins and name not in pins}
    lock = folder / LOCK.name
    kept = re.sub(rf"(?m)^(?:{'|'.join([*pins, *loose])})==.*\n(?:[ ].*\n)*", "", LOCK.read_text(encoding="utf-8"))
    wanted = [f"{name}=={version}" for name, version in pins.items()]
    given: list[str] = project["dependencies"]
    dev: list[str] = project.get("optional-dependencies", {}).get("dev", [])
    changed, changed_dev = ([_without_bounds(each, {*pins, *loose}) for each in some] for some in (given, dev))
    bounds: tuple[str, ...] = ()
    lock.write_text(kept, encoding="utf-8")
    _write_project(folder, project, [*given, *wanted], dev)
    try:
        _compile(folder)
    except UserError:  # the project's own bounds may be what refuses it: those are changed when it is accepted
        both = zip([*given, *dev], [*changed, *changed_dev], strict=True)
        bounds = tuple(one for one, other in both if one != other)
        _write_project(folder, project, [*changed, *wanted], changed_dev)
        _compile(folder)
    before, after = locked(LOCK), locked(lock)
    differing = {name: (before.get(name), after.get(name)) for name in sorted({*before, *after})}
    versions = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
    return Resolved(lock=lock, versions=versions, bounds=bounds)


def install(lock: Path, into: Path) -> Path:
    """Make an environment from a lock; return its interpreter."""
    _uv("venv", "--quiet", "--python", sys.executable, str(into))
    python = into / "bin" / "python"
    _uv("pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", str(python), "-r", str(lock))
    return python


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder, which stays unless the block fails or is stopped."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _without_bounds(requirement: str, names: Iterable[str]) -> str:
    match = _NAME.match(requirement)
    if match and _normal(match[0]) in names:
        _, semicolon, marker = requirement.partition(";")
        return f"{match[0]}{semicolon}{marker}"
    return requirement


def _write_project(folder: Path, project: Mapping[str, object], dependencies: list[str], dev: list[str]) -> None:
    """Write a `pyproject.toml` with the project's name, for which its lock was made, and other dependencies."""
    values = {key: project[key] for key in ("name", "version", "requires-python")} | {"dependencies": dependencies}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    text = "\n".join(["[project]", *lines, "[project.optional-dependencies]", f"dev = {json.dumps(dev)}", ""])
    (folder / PYPROJECT).write_text(text, encoding="utf-8")


def _compile(folder: Path) -> None:
    options = ("--universal", "--generate-hashes", "--no-header", "--no-emit-index-url", "--quiet", "--extra", "dev")
    _uv("pip", "compile", str(PYPROJECT), *options, "--output-file", LOCK.name, folder=folder)


def _uv(*arguments: str, folder: Path | None = None) -> None:
    """Run uv; raise UserError, in one line, where it fails."""
    program = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if program is None:
        raise UserError("uv: not installed; `make env` installs it")
    env = dict(os.environ)
    if index := env.get("UV_DEFAULT_INDEX") or env.get("PIP_INDEX_URL") or _index_of_pip():
        env["UV_DEFAULT_INDEX"] = index
    try:
        result = subprocess.run(
            [program, *arguments], cwd=folder, env=env, capture_output=True, check=False, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"uv {arguments[0]}: did not finish within {_TIMEOUT_SECONDS} s") from None
    if result.returncode:
        raise UserError(f"uv: {_said(result.stderr.decode(errors='replace'))}")


def _index_of_pip() -> str:
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    return subprocess.run(command, capture_output=True, check=False, text=True).stdout.strip()


def _said(text: str) -> str:
    """Return an error of uv as one line, without the address of an index."""
    plain = re.sub(r"[^\S\n]*[×╰─▶├│]+", " ", re.sub(r"[a-z+]+://\S+", "(an index)", text))
    lines = [line for line in plain.splitlines() if line.strip() and not line.strip().startswith(("warning", "hint"))]
    return one_line(" ".join(lines)).removeprefix("error: ")[:_LONGEST_LINE] or "failed without a word"
