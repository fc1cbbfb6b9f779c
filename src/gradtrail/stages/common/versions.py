"""The versions that results depend on: recorded in `versions.yaml`, a DVC param of every stage that computes."""

from importlib.metadata import version
from pathlib import Path

from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import read_yaml
from gradtrail.support.errors import UserError

PATH = Path("versions.yaml")
_HEADER = (
    "# The packages that results depend on, as requirements.lock has them: a DVC param of every stage that computes,\n"
    "# so that an upgrade re-runs it. `gradtrail versions` writes what is installed.\n"
)


def require_recorded_versions(packages: tuple[str, ...]) -> None:
    """Raise UserError where an installed package is not of the version under which DVC will record the result."""
    recorded = read_yaml(PATH)
    for package in packages:
        if version(package) != recorded.get(package):
            raise UserError(
                f"{PATH}: {package} is {recorded.get(package)} there, but {version(package)} is installed: "
                "install requirements.lock, or record what is installed with `gradtrail versions`"
            )


def write_installed_versions() -> dict[str, str]:
    """Record the installed version of every package that `versions.yaml` names; return what was recorded."""
    installed = {package: version(package) for package in read_yaml(PATH)}
    with atomic_file(PATH) as beside:
        lines = [f'{package}: "{number}"\n' for package, number in installed.items()]
        beside.write_text(_HEADER + "".join(lines))
    return installed
