"""The command `gradtrail`: what surrounds a run of the pipeline. The stages themselves are DVC's to run."""

import argparse
import sys

from gradtrail.io import reproduction, synchronization
from gradtrail.io.errors import UserError
from gradtrail.io.versions import write_installed_versions


def main() -> None:
    """Run a subcommand. A fault that a person can mend is one line, and exit status 2."""
    parser = argparse.ArgumentParser(prog="gradtrail", description="What surrounds a run of the pipeline.")
    commands = parser.add_subparsers(dest="command", required=True)
    repro = commands.add_parser(
        "repro", help="run the pipeline; go on with the digits where no source of MNIST answers"
    )
    repro.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to `dvc repro`")
    commands.add_parser("sync", help="give every state in dvc.lock its row in MLflow")
    commands.add_parser("versions", help="record the installed packages in versions.yaml")
    arguments = parser.parse_args()
    try:
        sys.exit(_run(arguments))
    except UserError as error:
        print(f"gradtrail: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    match arguments.command:
        case "repro":
            return reproduction.reproduce(arguments.arguments)
        case "sync":
            print(synchronization.sync().describe())
        case "versions":
            for package, version in write_installed_versions().items():
                print(f"{package} {version}")
    return 0
