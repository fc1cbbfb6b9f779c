"""A scratch environment: the project's lock with some versions changed, resolved and installed by uv.

It writes no file of the project and no index address: uv's settings, or else pip's, determine the index.
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
_FOLLOWS = {"jaxlib": "jax"}  # package → the package whose version it takes, unless it is requested itself
_TIMEOUT_SECONDS = 1800
_LONGEST_LINE = 400  # characters


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A new lock."""

    lock: Path
    versions: Mapping[str, tuple[str | None, str | None]]  # changed packages: version before and after, None if absent
    bounds: tuple[str, ...]  # requirements of `pyproject.toml` that do not allow the change


def read_pins(words: Iterable[str]) -> dict[str, str]:
    """Return the requested versions, package → version; raise UserError for a word that is not PACKAGE==VERSION."""
    current, pins = locked(LOCK), dict[str, str]()
    for word in words:
        if not (match := _PIN.fullmatch(word)):
            raise UserError(f"{word}: must be PACKAGE==VERSION, such as jax==0.10.2")
        name = _normal(match[1])
        if name not in current:
            raise UserError(f"{word}: {LOCK} has no package {name}{suggestion(name, current)}")
        pins[name] = match[2]
    if all(current[name] == version for name, version in pins.items()):
        raise UserError(f"{', '.join(words)}: {LOCK} has this already")
    return pins


def locked(lock: Path) -> dict[str, str]:
    """Return the versions in a lock, package → version; all versions of a package that has several."""
    versions = dict[str, str]()
    if not lock.is_file():
        raise UserError(f"{lock}: no such file")
    text = lock.read_text(encoding="utf-8")
    for name, version in re.findall(r"(?m)^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", text):
        versions[name] = f"{versions[name]}, {version}" if name in versions else version
    return versions


def resolve(pins: Mapping[str, str], folder: Path) -> Resolved:
    """Resolve the lock with some versions changed; other packages keep version and hashes if possible.

    Raises:
        UserError: There is no such version, or no set of packages fits.
    """
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    loose = {name for name, leader in _FOLLOWS.items() if leader in pins and name not in pins}
    lock = folder / LOCK.name
    unchanged = re.sub(rf"(?m)^(?:{'|'.join([*pins, *loose])})==.*\n(?:[ ].*\n)*", "", LOCK.read_text(encoding="utf-8"))
    requested = [f"{name}=={version}" for name, version in pins.items()]
    dependencies: list[str] = project["dependencies"]
    dev: list[str] = project.get("optional-dependencies", {}).get("dev", [])
    changed, changed_dev = (
        [_without_bounds(requirement, {*pins, *loose}) for requirement in group] for group in (dependencies, dev)
    )
    bounds: tuple[str, ...] = ()
    lock.write_text(unchanged, encoding="utf-8")
    _write_project(folder, project, [*dependencies, *requested], dev)
    try:
        _compile(folder)
    except UserError:  # perhaps because of the project's bounds, which may be changed
        both = zip([*dependencies, *dev], [*changed, *changed_dev], strict=True)
        bounds = tuple(before for before, after in both if before != after)
        _write_project(folder, project, [*changed, *requested], changed_dev)
        _compile(folder)
    before, after = locked(LOCK), locked(lock)
    differing = {name: (before.get(name), after.get(name)) for name in sorted({*before, *after})}
    versions = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
    return Resolved(lock=lock, versions=versions, bounds=bounds)


def install(lock: Path, into: Path) -> Path:
    """Create an environment from a lock; return its interpreter."""
    _uv("venv", "--quiet", "--python", sys.executable, str(into))
    python = into / "bin" / "python"
    _uv("pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", str(python), "-r", str(lock))
    return python


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[Path]:
    """Yield a new, empty folder, which is removed if the block fails or is stopped."""
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
    """Write a `pyproject.toml` with the project's name, which the lock mentions, and other dependencies."""
    values = {key: project[key] for key in ("name", "version", "requires-python")} | {"dependencies": dependencies}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    text = "\n".join(["[project]", *lines, "[project.optional-dependencies]", f"dev = {json.dumps(dev)}", ""])
    (folder / PYPROJECT).write_text(text, encoding="utf-8")


def _compile(folder: Path) -> None:
    options = ("--universal", "--generate-hashes", "--no-header", "--no-emit-index-url", "--quiet", "--extra", "dev")
    _uv("pip", "compile", str(PYPROJECT), *options, "--output-file", LOCK.name, folder=folder)


def _uv(*arguments: str, folder: Path | None = None) -> None:
    """Run uv; raise UserError if it fails."""
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
        raise UserError(f"uv: {_uv_error(result.stderr.decode(errors='replace'))}")


def _index_of_pip() -> str:
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    return subprocess.run(command, capture_output=True, check=False, text=True).stdout.strip()


def _uv_error(text: str) -> str:
    """Return an error of uv as one line, without index addresses."""
    plain = re.sub(r"[^\S\n]*[×╰─▶├│]+", " ", re.sub(r"[a-z+]+://\S+", "(an index)", text))
    lines = [line for line in plain.splitlines() if line.strip() and not line.strip().startswith(("warning", "hint"))]
    return one_line(" ".join(lines)).removeprefix("error: ")[:_LONGEST_LINE] or "failed without a message"
