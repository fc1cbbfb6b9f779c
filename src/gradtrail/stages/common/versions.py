"""Package versions that can change an output: `pipeline/versions.yaml`, a DVC param of the stages that use them."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import read_yaml
from gradtrail.support.errors import UserError

PATH = Path("pipeline/versions.yaml")
_HEADER = (
    "# Every package that can change an out, as locks/base.lock has it: a DVC param of each stage that imports it,\n"
    "# so that an upgrade re-runs the stage. `gradtrail versions` writes what is installed.\n"
)


def require_recorded_versions(packages: tuple[str, ...]) -> None:
    """Raise UserError if an installed version differs from the one in `pipeline/versions.yaml`, which DVC records."""
    recorded = read_yaml(PATH)
    for package in packages:
        try:
            installed = version(package)
        except PackageNotFoundError:  # such as while another process installs it
            installed = "none"
        if installed != recorded.get(package):
            raise UserError(
                f"{PATH}: it has {package} {recorded.get(package)}, but {installed} is installed: "
                "install locks/base.lock, or record the installed versions with `gradtrail versions`"
            )


def write_installed_versions() -> dict[str, str]:
    """Record the installed version of every package in `pipeline/versions.yaml`; return the versions."""
    installed = {package: version(package) for package in read_yaml(PATH)}
    with atomic_file(PATH) as temporary:
        lines = [f'{package}: "{number}"\n' for package, number in installed.items()]
        temporary.write_text(_HEADER + "".join(lines))
    return installed
