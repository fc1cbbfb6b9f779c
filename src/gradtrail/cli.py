"""The command `gradtrail`: what surrounds a run of the pipeline. The stages themselves are DVC's to run."""

import argparse
import sys

from gradtrail.io import synchronization
from gradtrail.io.errors import UserError, one_line
from gradtrail.io.versions import write_installed_versions


def main() -> None:
    """Run a subcommand. A fault that a person can mend is one line, and exit status 2."""
    parser = argparse.ArgumentParser(prog="gradtrail", description="What surrounds a run of the pipeline.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("repro", help="`dvc repro`, with its options; on the digits where MNIST is out of reach")
    commands.add_parser("sync", help="give every state in dvc.lock its row in MLflow")
    commands.add_parser("versions", help="record the installed packages in versions.yaml")
    arguments, rest = parser.parse_known_args()
    if rest and arguments.command != "repro":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        sys.exit(_run(arguments.command, rest))
    except UserError as error:
        print(f"gradtrail: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(command: str, arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    match command:
        case "repro":
            from gradtrail.io import reproduction  # late: it knows every stage's config, and so imports jax

            return reproduction.reproduce(arguments)
        case "sync":
            print(_sync())
        case "versions":
            for package, version in write_installed_versions().items():
                print(f"{package} {version}")
    return 0


def _sync() -> str:
    try:
        return synchronization.sync().describe()
    except UserError:
        raise
    except Exception as error:  # whatever the store does
        raise UserError(f"MLflow's store failed: {one_line(error)[:200]}") from error
