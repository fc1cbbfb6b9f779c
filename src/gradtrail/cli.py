"""The command `gradtrail`: what a person does around the runs of the pipeline. DVC runs the stages themselves.

Each verb is one function of the package that it names, imported when the verb is called: many import JAX or MLflow.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gradtrail.core.common.validation import ConfigError
from gradtrail.serving import commands as serving
from gradtrail.stages.common.environment import require_jax
from gradtrail.support.errors import DamagedDatabaseError, UserError, one_line, printable, with_store
from gradtrail.support.verb import Verb

_PATH = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)
_PORT = click.IntRange(1, 2**16 - 1)
_AMOUNT = click.FloatRange(min=0)
_SECONDS = click.FloatRange(0, 86_400, min_open=True)
_PYTHONS = {"python_a": "--python-a", "python_b": "--python-b"}


def main() -> None:
    """Run a verb. An error that a person can correct is one line on stderr, with exit status 2."""
    try:
        sys.exit(gradtrail(prog_name="gradtrail", standalone_mode=False))
    except click.UsageError as error:
        verb = error.ctx.command_path if error.ctx else "gradtrail"
        print(f"{verb}: {printable(one_line(error.format_message()))} See `{verb} --help`.", file=sys.stderr)
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


class _Verbs(click.Group):
    command_class = Verb


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Runs in any folder of the repository. `gradtrail VERB --help` shows the options of a verb, and an example.",
)
@click.version_option(package_name="gradtrail", message="%(prog)s %(version)s")
@click.pass_context
def gradtrail(ctx: click.Context) -> None:
    """Run the pipeline, compare its runs, and maintain the MLflow store."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@gradtrail.command(
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS OF `dvc repro`]",
    epilog="Example: gradtrail repro --force train",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[STAGE]...")
def repro(arguments: tuple[str, ...]) -> int:
    """Run the pipeline with `dvc repro`.

    Stages that are up to date do not run. Where no source of MNIST is available, the pipeline runs on scikit-learn's
    digits. Unless stages are named, it ends with the accuracy and the path of the report.
    """
    from gradtrail.experiments.repro import reproduce

    return reproduce([*arguments])


@gradtrail.command(epilog="Example: gradtrail runs --where train.model=cnn --sort-by eval/loss")
@click.option("--sort-by", default="eval/accuracy", metavar="KEY", show_default=True, help="A metric or a param.")
@click.option("--sort-order", type=click.Choice(["asc", "desc"]), default="desc", show_default=True)
@click.option("--where", type=_pair, multiple=True, metavar="KEY=VALUE", help="Such as train.model=cnn; repeatable.")
@click.option("--limit", type=_COUNT, metavar="N", help="Maximum number of runs.")
def runs(sort_by: str, sort_order: str, where: tuple[tuple[str, str], ...], limit: int | None) -> None:
    """List training runs, with the params that differ between them."""
    from gradtrail.experiments.list_runs import print_runs

    ascending = sort_order == "asc"
    with_store(lambda: print_runs(sort_by=sort_by, ascending=ascending, where=dict(where), limit=limit))


@gradtrail.command(epilog="Example: gradtrail show models/final.safetensors")
@click.argument("what")
@click.pass_obj
def show(place: Path, what: str) -> int:
    """Show the lineage of a run, its outputs, and how to restore them.

    WHAT is the id or name of a run, a state, a DVC experiment, or a file.
    """
    from gradtrail.experiments.show.main import show

    return with_store(lambda: show(what, place))


@gradtrail.command(epilog="Example: gradtrail ui --port 5001")
@click.option("--port", type=_PORT, default=5000, show_default=True)
def ui(port: int) -> int:
    """Backfill missing runs, then serve the MLflow UI.

    Prints a link to a comparison of all training runs. Ctrl-C or SIGTERM stops the server.
    """
    from gradtrail.experiments.ui import serve

    return with_store(lambda: serve(port))


@gradtrail.command(
    short_help="Review suspected label errors in a browser.", epilog="Example: gradtrail review --limit 50"
)
@click.argument("files", nargs=-1, type=_PATH, metavar="[FILE.csv]...")
@click.option(
    "--merge", "is_merge", is_flag=True, help="Add the corrections in FILE.csv... to pipeline/corrections.csv."
)
@click.option(
    "--file", type=_PATH, help="File to write corrections to.  [default: pipeline/corrections.csv of the repository]"
)
@click.option("--reviewer", metavar="NAME", help="Who decides.  [default: git's user.name]")
@click.option("--split", type=click.Choice(["train", "validation", "test"]), help="Split to review; all by default.")
@click.option("--limit", type=_COUNT, default=200, show_default=True, metavar="N", help="Maximum number of labels.")
@click.option("--port", type=click.IntRange(0, 65535), default=5001, show_default=True)
@click.pass_obj
def review(place: Path, /, files: tuple[Path, ...], *, is_merge: bool, file: Path | None, **options: Any) -> None:
    """Look through suspected label errors in a browser, and correct them."""
    from gradtrail.experiments.review.main import merge, review

    if is_merge != bool(files):
        raise UserError("--merge: needs the files to join, such as: gradtrail review --merge ann.csv ben.csv")
    into = place / file if file else Path("pipeline/corrections.csv")
    if is_merge:
        merge([place / name for name in files], into)
    else:
        review(into, **options)


@gradtrail.command(epilog="Example: gradtrail sync --verbose")
@click.option("--yes", is_flag=True, help="Set a damaged database aside without asking.")
@click.option("--verbose", "-v", is_flag=True, help="Also report states whose files are missing.")
def sync(*, yes: bool, verbose: bool) -> None:
    """Backfill the MLflow runs of all commits and experiments.

    Runs are rebuilt from the outputs in DVC's cache. Does nothing if nothing has changed since the last sync.
    """
    from gradtrail.tracking.sync.sync import set_aside, sync

    try:
        report = with_store(sync)
    except DamagedDatabaseError as error:
        if not (yes or (sys.stdin.isatty() and click.confirm(f"{error}. Continue?"))):
            raise
        print(f"the damaged database is {set_aside()} now")
        report = with_store(sync)
    print(report.describe(verbose=verbose))


@gradtrail.command(epilog="Example: gradtrail gc --yes")
@click.option("--yes", is_flag=True, help="Remove without asking.")
def gc(*, yes: bool) -> None:
    """Remove what no recorded state needs.

    Lists runs, artifacts and checkpoints, and asks before it removes them.
    """
    from gradtrail.tracking.gc.gc import collect_garbage

    with_store(lambda: collect_garbage(yes=yes))


@gradtrail.command(epilog="Example: gradtrail recipes cnn --seeds 0,1,2")
@click.argument("name", required=False)
@click.option("--seeds", type=_seeds, default="0", metavar="LIST", show_default=True, help="Such as 0,1,2.")
def recipes(name: str | None, seeds: list[int]) -> int:
    """List the recipes of experiments.yaml, or run one as DVC experiments."""
    if name:
        require_jax()
    from gradtrail.experiments.sweep.recipes import list_recipes, run_recipe

    return run_recipe(name, seeds) if name else list_recipes()


@gradtrail.command(epilog="Example: gradtrail results > table.md")
def results() -> None:
    """Print the results of the recipes as a Markdown table."""
    from gradtrail.experiments.sweep.recipes import as_markdown, collect_results

    print(as_markdown(with_store(collect_results)))


def _running_elsewhere(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say who runs experiments."""
    for option in (
        click.option("--gpus", type=_AMOUNT, default=0, metavar="N", help="GPUs of each experiment, with --on."),
        click.option(
            "--cpus",
            type=_AMOUNT,
            default=1,
            show_default=True,
            metavar="N",
            help="CPU cores of each experiment, with --on.",
        ),
        click.option(
            "--on",
            metavar="ADDRESS",
            help="Run on a Ray cluster: its job server, such as http://HOST:8265, or `local` for a Ray on this machine."
            "  [default: RAY_API_SERVER_ADDRESS, or else DVC's queue]",
        ),
        click.option(
            "--jobs",
            type=_COUNT,
            default=1,
            metavar="N",
            show_default=True,
            help="Runs at a time in DVC's queue; they share cores.",
        ),
    ):
        verb = option(verb)
    return verb


@gradtrail.command(epilog="Example: gradtrail compare precision --seeds 0,1,2 --jobs 2")
@click.argument("name", required=False)
@click.option("--seeds", type=_seeds, metavar="LIST", help="Such as 0,1,2.  [default: those of experiments.yaml]")
@_running_elsewhere
def compare(name: str | None, seeds: list[int] | None, *, jobs: int, **place: Any) -> int:
    """Compare variants of the training over seeds.

    Without a NAME lists the comparisons of experiments.yaml; else runs what is missing of one, and prints its table.
    """
    from gradtrail.cluster.ray.engine import engine

    runner = engine(**place)
    if name and runner is None:
        require_jax()
    from gradtrail.experiments.sweep.main import compare, list_comparisons

    return compare(name, seeds, runner, jobs=jobs) if name else with_store(list_comparisons)


@gradtrail.command(epilog="Example: gradtrail sweep rates.yaml --on http://10.0.0.5:8265")
@click.argument("file", type=_PATH, metavar="FILE.yaml")
@_running_elsewhere
@click.pass_obj
def sweep(here: Path, /, file: Path, *, jobs: int, **place: Any) -> int:
    """Run a grid or a list of params, and list the results.

    FILE.yaml has `grid` (key → values), `points` (a list of changes) or both, and `set`, changes to all of them.
    """
    from gradtrail.cluster.ray.engine import engine

    runner = engine(**place)
    if runner is None:
        require_jax()
    from gradtrail.experiments.sweep.grid import sweep

    return sweep(here / file, runner, jobs=jobs)


@gradtrail.command(epilog="Example: gradtrail diff HEAD workspace")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--stage", metavar="STAGE", help="Of the runs, such as gradients.  [default: train]")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--time", "is_timed", is_flag=True, help="Also run both trainings in turn, and print how much slower B is."
)
@click.option("--seconds", type=_SECONDS, default=300.0, show_default=True, metavar="N", help="For --time, at most.")
@click.option("--python-a", metavar="PATH", help="For --time: the interpreter of A.  [default: this one]")
@click.option("--python-b", metavar="PATH", help="For --time: the interpreter of B.  [default: this one]")
@click.pass_obj
def diff(
    place: Path, /, before: str, after: str, stage: str | None, *, as_json: bool, is_timed: bool, **how: Any
) -> None:
    """Compare two runs, down to the instruction, and say why one was slower.

    A and B are ids or names of runs, states, DVC experiments, commits or `workspace`; A@2 is the second execution.
    """
    from gradtrail.experiments.diff.main import diff
    from gradtrail.experiments.diff.timed import Timing, interpreter

    if not is_timed and (how["python_a"] or how["python_b"]):
        raise UserError("--python-a, --python-b: need --time")
    if is_timed:
        require_jax()
    pythons = [interpreter(how[name], place, option) for name, option in _PYTHONS.items()]
    timing = Timing(seconds=how["seconds"], pythons=(pythons[0], pythons[1])) if is_timed else None
    with_store(lambda: diff(before, after, stage, as_json=as_json, timing=timing))


for _verb in serving.VERBS:
    gradtrail.add_command(_verb)


@gradtrail.command(epilog="Example: gradtrail gate --accept")
@click.option("--accept", is_flag=True, help="Accept the current costs.")
@click.option("--timed", is_flag=True, help="Also time the training against the commit that last accepted the costs.")
@click.option("--seconds", type=_SECONDS, default=300.0, show_default=True, metavar="N", help="For --timed, at most.")
def gate(*, accept: bool, timed: bool, seconds: float) -> int:
    """Compare costs of compiled functions with the accepted costs.

    The costs are static: FLOPs, bytes, instructions. See benchmarks/accepted_costs.json.
    """
    require_jax()
    from gradtrail.experiments.cost_gate import ACCEPTED, run_gate
    from gradtrail.experiments.timed.gate import run_timed_gate

    if accept and timed:
        raise UserError("--timed and --accept cannot be combined")
    static = run_gate(accept=accept)
    return max(static, run_timed_gate(ACCEPTED, seconds=seconds)) if timed else static


@gradtrail.command(epilog="Example: gradtrail upgrade jax==0.10.2")
@click.argument("packages", nargs=-1, required=True, metavar="PACKAGE==VERSION...")
@click.option("--seconds", type=_SECONDS, default=300.0, show_default=True, metavar="N", help="For timing, at most.")
def upgrade(packages: tuple[str, ...], seconds: float) -> None:
    """Rehearse other versions of packages: programs, costs, times, bits and accuracy. Changes nothing."""
    require_jax()
    from gradtrail.experiments.upgrade.main import upgrade

    upgrade(packages, seconds=seconds)


@gradtrail.command(epilog="Example: gradtrail versions")
def versions() -> None:
    """Record the installed package versions in pipeline/versions.yaml."""
    from gradtrail.stages.common.versions import write_installed_versions

    for package, version in write_installed_versions().items():
        print(f"{package} {version}")
