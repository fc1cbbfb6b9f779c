"""The command `gradtrail`: what a person does around the runs of the pipeline. DVC runs the stages themselves.

Each verb is one function of the package that it names, imported when the verb is called: many import JAX or MLflow.
"""

import sys
from pathlib import Path
from typing import Any

import click

from gradtrail.core.common.validation import ConfigError
from gradtrail.support.errors import DamagedDatabaseError, UserError, one_line, with_store

_PATH = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


def main() -> None:
    """Run a verb. An error that a person can correct is one line on stderr, with exit status 2."""
    try:
        sys.exit(gradtrail(prog_name="gradtrail", standalone_mode=False))
    except click.UsageError as error:
        verb = error.ctx.command_path if error.ctx else "gradtrail"
        print(f"{verb}: {one_line(error.format_message())} See `{verb} --help`.", file=sys.stderr)
        sys.exit(2)
    except (UserError, ConfigError) as error:
        print(f"gradtrail: {error}", file=sys.stderr)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds: must be integers separated by commas, such as 0,1,2; got {text!r}") from None


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not (key and sign):
        raise UserError(f"--where: must be KEY=VALUE, such as train.model=cnn; got {text!r}")
    return key, value


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="gradtrail", message="%(prog)s %(version)s")
def gradtrail() -> None:
    """Run the pipeline, compare its runs, and keep MLflow's store in order."""


@gradtrail.command(context_settings={"ignore_unknown_options": True}, options_metavar="[OPTIONS OF `dvc repro`]")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[STAGE]...")
def repro(arguments: tuple[str, ...]) -> int:
    """Run `dvc repro`; on the digits where no source of MNIST answers."""
    from gradtrail.experiments.repro import reproduce

    return reproduce([*arguments])


@gradtrail.command()
@click.option("--sort-by", default="eval/accuracy", metavar="KEY", show_default=True, help="A metric or a param.")
@click.option("--sort-order", type=click.Choice(["asc", "desc"]), default="desc", show_default=True)
@click.option("--where", type=_pair, multiple=True, metavar="KEY=VALUE", help="Such as train.model=cnn; repeatable.")
@click.option("--limit", type=_COUNT, metavar="N", help="Maximum number of runs.")
def runs(sort_by: str, sort_order: str, where: tuple[tuple[str, str], ...], limit: int | None) -> None:
    """List the training runs, and the params in which they differ."""
    from gradtrail.experiments.list_runs import print_runs

    ascending = sort_order == "asc"
    with_store(lambda: print_runs(sort_by=sort_by, ascending=ascending, where=dict(where), limit=limit))


@gradtrail.command()
@click.argument("what")
def show(what: str) -> int:
    """Show the lineage of a run, its outs, and how to restore them.

    WHAT is the id or name of a run, a state, a DVC experiment, or a file.
    """
    from gradtrail.experiments.show.main import show

    return with_store(lambda: show(what))


@gradtrail.command()
@click.argument("images", nargs=-1, required=True, type=_PATH, metavar="IMAGE.png...")
@click.option("--weights", type=_PATH, default=Path("models/final.safetensors"), show_default=True)
@click.option("--figure", type=_PATH, metavar="FILE.png", help="Draw the images as the network sees them.")
@click.option("--picture", type=_PATH, hidden=True, deprecated="Use --figure.")
def predict(images: tuple[Path, ...], weights: Path, figure: Path | None, picture: Path | None) -> None:
    """Classify images."""
    from gradtrail.experiments.predict import predict

    predict(images, weights, figure or picture)


@gradtrail.command()
@click.option("--port", type=int, default=5000, show_default=True)
def ui(port: int) -> int:
    """Sync, then serve MLflow's UI with a link to compare runs."""
    from gradtrail.experiments.ui import serve

    return with_store(lambda: serve(port))


@gradtrail.command()
@click.argument("files", nargs=-1, type=_PATH, metavar="[FILE.csv]...")
@click.option(
    "--merge", "is_merge", is_flag=True, help="Join the corrections in FILE.csv... into labels/corrections.csv."
)
@click.option("--file", type=_PATH, default=Path("labels/corrections.csv"), show_default=True, help="To write to.")
@click.option("--reviewer", metavar="NAME", help="Who decides.  [default: git's user.name]")
@click.option("--split", type=click.Choice(["train", "validation", "test"]), help="To look at; all by default.")
@click.option("--limit", type=_COUNT, default=200, show_default=True, metavar="N", help="Maximum number of labels.")
@click.option("--port", type=click.IntRange(0, 65535), default=5001, show_default=True)
def review(files: tuple[Path, ...], *, is_merge: bool, file: Path, **options: Any) -> None:
    """Look through suspected label errors in a browser, and correct them."""
    from gradtrail.experiments.review.main import merge, review

    if is_merge != bool(files):
        raise UserError(
            "--merge: needs the files to join, such as: gradtrail review --merge labels/ann.csv labels/ben.csv"
        )
    if is_merge:
        merge(files, file)
    else:
        review(file, **options)


@gradtrail.command()
@click.option("--yes", is_flag=True, help="Set a damaged database aside without asking.")
def sync(*, yes: bool) -> None:
    """Backfill the MLflow runs of every commit and experiment."""
    from gradtrail.tracking.sync.sync import set_aside, sync

    try:
        report = with_store(sync)
    except DamagedDatabaseError as error:
        if not (yes or (sys.stdin.isatty() and click.confirm(f"{error}. Do so?"))):
            raise
        print(f"the damaged database is {set_aside()} now")
        report = with_store(sync)
    print(report.describe())


@gradtrail.command()
@click.option("--yes", is_flag=True, help="Remove without asking.")
def gc(*, yes: bool) -> None:
    """List and remove what no state refers to: runs, artifacts and files."""
    from gradtrail.tracking.gc.gc import collect_garbage

    with_store(lambda: collect_garbage(yes=yes))


@gradtrail.command()
@click.argument("name", required=False)
@click.option("--seeds", type=_seeds, default="0", metavar="LIST", show_default=True, help="Such as 0,1,2.")
def recipes(name: str | None, seeds: list[int]) -> int:
    """List the experiments of recipes.yaml, or run one."""
    from gradtrail.experiments.sweep.recipes import list_recipes, run_recipe

    return run_recipe(name, seeds) if name else list_recipes()


@gradtrail.command()
def results() -> None:
    """Print the results of the recipes as a Markdown table."""
    from gradtrail.experiments.sweep.recipes import as_markdown, collect_results

    print(as_markdown(with_store(collect_results)))


@gradtrail.command()
@click.argument("name", required=False)
@click.option("--seeds", type=_seeds, metavar="LIST", help="Such as 0,1,2.  [default: those of comparisons.yaml]")
@click.option(
    "--jobs", type=_COUNT, default=1, metavar="N", show_default=True, help="Runs at a time; they share cores."
)
def compare(name: str | None, seeds: list[int] | None, jobs: int) -> int:
    """List the comparisons of comparisons.yaml, or complete one."""
    from gradtrail.experiments.sweep.main import compare, list_comparisons

    return compare(name, seeds, jobs) if name else with_store(list_comparisons)


@gradtrail.command()
@click.option("--accept", is_flag=True, help="Accept the current costs.")
def gate(*, accept: bool) -> int:
    """Compare the static costs of functions with the accepted ones."""
    from gradtrail.experiments.cost_gate import run_gate

    return run_gate(accept=accept)


@gradtrail.command()
def versions() -> None:
    """Record the installed package versions in versions.yaml."""
    from gradtrail.stages.common.versions import write_installed_versions

    for package, version in write_installed_versions().items():
        print(f"{package} {version}")
