"""The command `gradtrail`: what surrounds a run of the pipeline. The stages themselves are DVC's to run."""

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import TypeVar

from gradtrail.core.bounds import ConfigError
from gradtrail.io import recipes, synchronization
from gradtrail.io.errors import UserError, one_line
from gradtrail.io.versions import write_installed_versions

T = TypeVar("T")


def main() -> None:
    """Run a subcommand. A fault that a person can mend is one line, and exit status 2."""
    parser = argparse.ArgumentParser(prog="gradtrail", description="What surrounds a run of the pipeline.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("repro", help="`dvc repro`, with its options; on the digits where MNIST is out of reach")
    ready = commands.add_parser("recipes", help="list the experiments of recipes.yaml, or run one")
    ready.add_argument("name", nargs="?")
    ready.add_argument("--seeds", default="0", help="of the training, such as 0,1,2")
    gate = commands.add_parser("gate", help="compare what the configured functions cost with what was accepted")
    gate.add_argument("--accept", action="store_true", help="accept what they cost now")
    commands.add_parser("results", help="what came out of the recipes that were run, as a table in Markdown")
    commands.add_parser("sync", help="give every state, of all commits and experiments, its row in MLflow")
    collect = commands.add_parser("gc", help="show, then remove, rows, artifacts and files that no state refers to")
    collect.add_argument("--yes", action="store_true", help="remove without asking")
    commands.add_parser("versions", help="record the installed packages in versions.yaml")
    arguments, rest = parser.parse_known_args()
    if rest and arguments.command != "repro":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        sys.exit(_run(arguments, rest))
    except (UserError, ConfigError) as error:
        print(f"gradtrail: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run the command and return its exit status."""
    match arguments.command:
        case "repro":
            from gradtrail.io import reproduction  # late: it knows every stage's config, and so imports jax

            return reproduction.reproduce(rest)
        case "gate":
            from gradtrail.io.gate import run_gate  # late: it imports jax

            return run_gate(accept=arguments.accept)
        case "recipes" if arguments.name:
            return recipes.run_recipe(arguments.name, _seeds(arguments.seeds))
        case "recipes":
            for name, recipe in recipes.read_recipes().items():
                print(f"{name}: {recipe.about}\n    {shlex.join(recipes.command(recipe))}")
        case "results" | "sync" | "gc":
            _with_store(lambda: _run_on_store(arguments))
        case "versions":
            for package, version in write_installed_versions().items():
                print(f"{package} {version}")
    return 0


def _run_on_store(arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "results":
            print(recipes.as_markdown(recipes.collect_results()))
        case "sync":
            print(synchronization.sync().describe())
        case "gc":
            from gradtrail.io.garbage import collect_garbage  # late: the other commands do not need it

            collect_garbage(yes=arguments.yes)


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds: whole numbers with commas between them, such as 0,1,2; got {text!r}") from None


def _with_store(action: Callable[[], T]) -> T:
    try:
        return action()
    except UserError:
        raise
    except Exception as error:  # whatever the store does
        raise UserError(f"MLflow's store failed: {one_line(error)[:200]}") from error
