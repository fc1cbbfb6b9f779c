"""The command `gradtrail`: what surrounds a run of the pipeline. The stages themselves are DVC's to run.

What imports jax or MLflow is imported by the command that needs it.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from gradtrail.core.common.validation import ConfigError
from gradtrail.experiments.sweep import recipes
from gradtrail.stages.common.versions import write_installed_versions
from gradtrail.support.errors import UserError, with_store
from gradtrail.tracking.sync import sync

_JOBS = "runs at a time (default: 1); on two cores one is about as fast, and its times are not of two that share them"


def main() -> None:
    """Run a subcommand. A fault that a person can mend is one line, and exit status 2."""
    parser = argparse.ArgumentParser(prog="gradtrail", description="What surrounds a run of the pipeline.")
    _add_commands(parser)
    arguments, rest = parser.parse_known_args()
    if rest and arguments.command != "repro":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    try:
        sys.exit(arguments.run(arguments))
    except (UserError, ConfigError) as error:
        print(f"gradtrail: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True)

    def add(run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__.removeprefix("_"), help=about)
        command.set_defaults(run=run)
        return command

    add(_repro, "`dvc repro`, with its options; on the digits where MNIST is out of reach")
    runs = add(_runs, "the trainings side by side: what differs, what came out, the best marked")
    runs.add_argument("--sort-by", default="eval/accuracy", metavar="KEY", help="a metric or a param")
    runs.add_argument("--sort-order", choices=("asc", "desc"), default="desc")
    runs.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help="such as train.model=cnn")
    runs.add_argument("--limit", type=int, metavar="N", help="rows at most")
    shown = add(_show, "what a row is made of, down to the raw data, what it wrote, and how its files come back")
    shown.add_argument("what", help="a row's id or name, a state, an experiment of DVC, or a file")
    predicted = add(_predict, "what the weights say of pictures of digits, and what they saw")
    predicted.add_argument("images", nargs="+", type=Path, metavar="IMAGE.png")
    predicted.add_argument(
        "--weights", type=Path, default=Path("models/final.safetensors"), help="(default: %(default)s)"
    )
    predicted.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw what was seen, with all probabilities"
    )
    shown = add(_ui, "`sync`, then MLflow's UI; prints the link to the trainings side by side")
    shown.add_argument("--port", type=int, default=5000)
    add(_sync, "give every state, of all commits and experiments, its row in MLflow")
    collect = add(_gc, "show, then remove, rows, artifacts and files that no state refers to")
    collect.add_argument("--yes", action="store_true", help="remove without asking")
    ready = add(_recipes, "list the experiments of recipes.yaml, or run one")
    ready.add_argument("name", nargs="?")
    ready.add_argument("--seeds", default="0", help="of the training, such as 0,1,2")
    add(_results, "what came out of the recipes that were run, as a table in Markdown")
    compared = add(_compare, "list the comparisons of comparisons.yaml, or make one: what is missing of it is run")
    compared.add_argument("name", nargs="?")
    compared.add_argument("--seeds", help="of the training, such as 0,1,2 (default: those of comparisons.yaml)")
    compared.add_argument("--jobs", type=int, default=1, metavar="N", help=_JOBS)
    gate = add(_gate, "compare what the configured functions cost with what was accepted")
    gate.add_argument("--accept", action="store_true", help="accept what they cost now")
    add(_versions, "record the installed packages in versions.yaml")


def _repro(arguments: argparse.Namespace) -> int:
    from gradtrail.experiments import repro  # it knows every stage's config

    return repro.reproduce(arguments.rest)


def _runs(arguments: argparse.Namespace) -> int:
    from gradtrail.experiments.list_runs import print_runs

    where = dict(_pair(text) for text in arguments.where)
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit: a whole number from 1; got {arguments.limit}")
    ascending = arguments.sort_order == "asc"
    with_store(lambda: print_runs(sort_by=arguments.sort_by, ascending=ascending, where=where, limit=arguments.limit))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from gradtrail.experiments.show.main import show

    return with_store(lambda: show(arguments.what))


def _predict(arguments: argparse.Namespace) -> int:
    from gradtrail.experiments.predict import predict

    predict(arguments.images, arguments.weights, arguments.picture)
    return 0


def _sync(_: argparse.Namespace) -> int:
    print(with_store(sync.sync).describe())
    return 0


def _ui(arguments: argparse.Namespace) -> int:
    from gradtrail.experiments.ui import serve

    return with_store(lambda: serve(arguments.port))


def _gc(arguments: argparse.Namespace) -> int:
    from gradtrail.tracking.gc.gc import collect_garbage

    with_store(lambda: collect_garbage(yes=arguments.yes))
    return 0


def _recipes(arguments: argparse.Namespace) -> int:
    if arguments.name:
        return recipes.run_recipe(arguments.name, _seeds(arguments.seeds))
    for name, recipe in recipes.read_recipes().items():
        print(f"{name}: {recipe.about}\n    {shlex.join(recipes.command(recipe))}")
    return 0


def _results(_: argparse.Namespace) -> int:
    print(recipes.as_markdown(with_store(recipes.collect_results)))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from gradtrail.experiments.sweep import main as comparing  # it draws

    if arguments.jobs < 1:
        raise UserError(f"--jobs: a whole number from 1; got {arguments.jobs}")
    if not arguments.name:
        with_store(comparing.list_comparisons)
        return 0
    seeds = None if arguments.seeds is None else _seeds(arguments.seeds)
    return comparing.compare(arguments.name, seeds, arguments.jobs)


def _gate(arguments: argparse.Namespace) -> int:
    from gradtrail.experiments.cost_gate import run_gate

    return run_gate(accept=arguments.accept)


def _versions(_: argparse.Namespace) -> int:
    for package, version in write_installed_versions().items():
        print(f"{package} {version}")
    return 0


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not (key and sign):
        raise UserError(f"--where: KEY=VALUE, such as train.model=cnn; got {text!r}")
    return key, value


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds: whole numbers with commas between them, such as 0,1,2; got {text!r}") from None
