"""The versions of the packages that can change an output, so that an upgrade re-runs the stages that use them.

`pipeline/versions.yaml` has those that the project imports, as DVC params. `pipeline/networks/versions.yaml` has those
that networks of one's own import, in the folder that is a dep of each stage which builds networks. Out of scope: what
these packages themselves import.
"""

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError

VERSIONS = Path("pipeline/versions.yaml")
NETWORK_VERSIONS = VERSIONS.parent / "networks" / VERSIONS.name
OF_EVERY_NETWORK = {"jax", "jaxlib", "flax", "numpy"}  # params of each stage that builds networks
_HEADER = (
    "# Every package that can change an out, as locks/base.lock has it: a DVC param of each stage that imports it,\n"
    "# so that an upgrade re-runs the stage. `gradtrail versions` writes what is installed.\n"
)
_NETWORKS_HEADER = (
    "# Every other package that a network in this folder imports. `gradtrail versions` writes what is installed.\n"
)


def require_recorded_versions(packages: Sequence[str], file: Path = VERSIONS) -> None:
    """Raise UserError if an installed version differs from the one in a file that DVC records."""
    recorded = read_yaml(file)
    for package in packages:
        installed = _installed(package) or "none"  # such as while another process installs it
        if installed != recorded.get(package):
            raise UserError(
                f"{file}: it has {package} {recorded.get(package)}, but {installed} is installed: "
                "install locks/base.lock, or record the installed versions with `gradtrail versions`"
            )


def require_recorded_imports(network: Path) -> None:
    """Raise UserError if a network of one's own imports a package whose installed version is not recorded."""
    recorded = network_versions()
    for module in sorted(imported_modules(network)):
        packages = [module] if module in recorded else _packages_of(module)
        if not packages:
            has_file = network.with_name(f"{module}.py").exists()
            advice = f"; import {module}.py by `from .{module} import ...`" if has_file else ""
            raise UserError(f"{network} imports {module}, which is no installed package{advice}")
        for package in packages:
            if package not in recorded:
                advice = "`gradtrail versions` records it, so that another version trains again"
                raise UserError(f"{network} imports {module}: {NETWORK_VERSIONS} has no {package}; {advice}")
        require_recorded_versions(packages, NETWORK_VERSIONS)


def imported_modules(network: Path) -> set[str]:
    """Return the top-level modules that a network and the files of its folder that it imports need, in functions too.

    Without the standard library, this project, the packages that are recorded for every network, and jaxtyping, whose
    annotations change no result.

    Raises:
        UserError: a file is not valid Python.
    """
    modules, files = set[str](), [network]
    for file in files:  # which grow
        try:
            nodes = [*ast.walk(ast.parse(file.read_bytes()))]
        except SyntaxError as error:
            raise UserError(f"{file}:{error.lineno}: {error.msg}") from None
        for node in nodes:
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(str(node.module).partition(".")[0])
            elif isinstance(node, ast.ImportFrom):
                folder = file.parents[node.level - 1]
                for name in [node.module] if node.module else [alias.name for alias in node.names]:
                    first = name.partition(".")[0]
                    paths = [*folder.glob(f"{first}.py"), *folder.glob(f"{first}/**/*.py")]
                    files += [path for path in paths if path not in files]
    return modules - sys.stdlib_module_names - OF_EVERY_NETWORK - {"gradtrail", "jaxtyping"}


def write_installed_versions() -> dict[str, str]:
    """Record the installed version of every package in both files; return the versions.

    What networks import and is not installed keeps the version that is recorded.
    """
    installed = {package: version(package) for package in read_yaml(VERSIONS)}
    _write(VERSIONS, _HEADER, installed)
    modules = set[str]().union(*map(imported_modules, NETWORK_VERSIONS.parent.glob("*.py")))
    elsewhere = {package: text for package, text in network_versions().items() if not _installed(package)}
    imported = {package: version(package) for module in modules for package in _packages_of(module)}
    if of_networks := dict(sorted((elsewhere | imported).items())):
        _write(NETWORK_VERSIONS, _NETWORKS_HEADER, of_networks)
    else:
        NETWORK_VERSIONS.unlink(missing_ok=True)
    return installed | of_networks


def _write(file: Path, header: str, versions: Mapping[str, str]) -> None:
    with atomic_file(file) as temporary:
        temporary.write_text(header + "".join(f'{package}: "{text}"\n' for package, text in versions.items()))


def network_versions() -> dict[str, str]:
    """Return the recorded versions of the packages that networks of one's own import."""
    return read_yaml(NETWORK_VERSIONS) if NETWORK_VERSIONS.exists() else {}


def _packages_of(module: str) -> list[str]:
    """Return the installed packages that have a top-level module, by their normalized names."""
    packages = packages_distributions().get(module, ())
    return sorted({re.sub(r"[-_.]+", "-", package).lower() for package in packages})


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
