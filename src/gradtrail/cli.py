"""The command `gradtrail`: its verbs, their options and help texts. DVC runs the stages themselves.

A verb imports its function when it is called, as many functions import JAX or MLflow.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gradtrail.core.config import ConfigError
from gradtrail.serving import commands as serving
from gradtrail.stages.common.environment import adapt_variables, require_jax
from gradtrail.support.errors import UserError, one_line, printable, with_store
from gradtrail.support.verb import Verb

_PATH = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
_AMOUNT = click.FloatRange(min=0)


def main() -> None:
    """Run a verb. An error that the user can correct is printed as one line on stderr, with exit status 2."""
    adapt_variables()
    try:
        status = with_store(lambda: gradtrail(prog_name="gradtrail", standalone_mode=False))
        sys.stdout.flush()
        sys.exit(status)
    except BrokenPipeError:  # `head` or a pager has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
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
        raise click.BadParameter(f"must be integers separated by commas, such as 0,1,2; got {text!r}.") from None


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not (key and sign):
        raise click.BadParameter(f"must be KEY=VALUE, such as train.model=cnn; got {text!r}.")
    return key, value


def _path_of_python(text: str) -> Path:
    for path in filter(None, map(shutil.which, (text, f"python{text}"))):
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(path).absolute()  # not resolved: Python finds its environment by the link
    raise click.BadParameter(f"no interpreter of Python at {text!r} that can be run.")


def _interpreter(option: str, user: str) -> Callable[..., Any]:
    about = f"Interpreter of {user}: a path, a name or a version such as 3.13.  [default: this one]"
    return click.option(
        option, type=_path_of_python, default=sys.executable, show_default=False, metavar="PYTHON", help=about
    )


def _seconds(work: str) -> Callable[..., Any]:
    kind, about = click.FloatRange(0, 86_400, min_open=True), f"Longest time for {work}."
    return click.option("--seconds", type=kind, default=300.0, metavar="N", help=about)


class _Verbs(click.Group):
    command_class = Verb


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
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

    Stages that are up to date do not run. If no source of MNIST can be reached, the pipeline uses scikit-learn's
    digits. Without a STAGE, the last lines are the accuracy and the path of the report.
    """
    from gradtrail.experiments.repro import reproduce

    return reproduce([*arguments])


@gradtrail.command(epilog="Example: gradtrail plan -S train.epochs=3 -S train.model=cnn evaluate")
@click.argument("stage", required=False)
@click.option("-S", "changes", multiple=True, metavar="KEY=VALUE", help="Changed param, as DVC takes it; repeatable.")
@click.option("--check", "is_check", is_flag=True, help="Exit with status 1 if a stage would run.")
def plan(stage: str | None, changes: tuple[str, ...], *, is_check: bool) -> int:
    """Show what `dvc repro` would do: stages to run, their seconds and memory.

    Runs no stage and changes no file of the project. With a STAGE, it and the stages before it. Seconds are those of
    the most similar earlier run on this kind of machine.
    """
    from gradtrail.experiments.plan import plan

    would_run = plan(changes, stage)
    return int(is_check and would_run)


@gradtrail.command("try", epilog="Example: gradtrail try -S train.model=cnn,resnet -S train.epochs=5")
@click.option(
    "-S", "changes", multiple=True, required=True, metavar="KEY=VALUE,VALUE", help="Changed param; repeatable."
)
def try_params(changes: tuple[str, ...]) -> int:
    """Train and evaluate with changed params, in a copy of the project.

    For each combination of values: prints the test accuracy and whether it differs from that of the workspace, and how
    to keep it. Changes no file here; each is a DVC experiment and a run in MLflow.
    """
    from gradtrail.experiments.try_params import try_params

    require_jax()
    return try_params(changes)


@gradtrail.command(epilog="Example: gradtrail runs --where train.model=cnn --sort-by eval/loss")
@click.option("--sort-by", default="eval/accuracy", metavar="METRIC", help="Metric to sort by.")
@click.option("--sort-order", type=click.Choice(["asc", "desc"]), default="desc", help="Order.")
@click.option("--where", type=_pair, multiple=True, metavar="KEY=VALUE", help="Required value of a param; repeatable.")
@click.option("--limit", type=_COUNT, default=50, metavar="N", help="Maximum number of runs.")
def runs(sort_by: str, sort_order: str, where: tuple[tuple[str, str], ...], limit: int) -> None:
    """List training runs and the params that differ between them."""
    from gradtrail.experiments.list_runs import print_runs

    print_runs(sort_by=sort_by, ascending=sort_order == "asc", where=dict(where), limit=limit)


@gradtrail.command(epilog="Example: gradtrail show models/final.safetensors")
@click.argument("run", required=False)
@click.pass_obj
def show(folder: Path, run: str | None) -> int:
    """Show the lineage of a run and its outputs; without RUN, DVC's table of experiments.

    RUN is the id or name of a run, a state, a DVC experiment, or a file that a run wrote.
    """
    from gradtrail.experiments.show import show, show_experiments

    return show(run, folder) if run else show_experiments()


@gradtrail.command(epilog="Example: gradtrail checkout 411e2e6a")
@click.argument("run")
@click.option("--allow-missing", is_flag=True, help="Bring back the rest if outs are missing.")
@click.pass_obj
def checkout(folder: Path, run: str, *, allow_missing: bool) -> int:
    """Bring back the code, params and outs of a run.

    RUN is as for `show`. If something is missing, or a file would be lost, says so and changes nothing.
    """
    from gradtrail.experiments.checkout import checkout

    return checkout(run, folder, allow_missing=allow_missing)


@gradtrail.command(epilog="Example: gradtrail ui --port 5001")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, help="Port of the UI.")
def ui(port: int) -> None:
    """Add missing runs, then serve the MLflow UI.

    Prints a link to a comparison of all training runs. Ctrl-C, SIGTERM or a closed terminal stops the server.
    """
    from gradtrail.experiments.ui import serve_ui

    serve_ui(port)


@gradtrail.command(epilog="Example: gradtrail review --limit 50")
@click.argument("files", nargs=-1, type=_PATH, metavar="[FILE.csv]...")
@click.option("--merge", "is_merge", is_flag=True, help="Add the corrections of FILE.csv... to those of --file.")
@click.option("--file", type=_PATH, help="File to write corrections to.  [default: pipeline/corrections.csv]")
@click.option("--reviewer", metavar="NAME", help="Name to record with each decision.  [default: git's user.name]")
@click.option("--split", type=click.Choice(["train", "validation", "test"]), help="Split to review.  [default: all]")
@click.option("--limit", type=_COUNT, default=200, metavar="N", help="Maximum number of labels.")
@click.option("--port", type=click.IntRange(0, 65535), default=5001, help="Port of the page.")
@click.pass_obj
def review(folder: Path, /, files: tuple[Path, ...], *, is_merge: bool, file: Path | None, **options: Any) -> None:
    """Review suspected label errors in a browser, and correct them."""
    from gradtrail.experiments.review import merge, review

    if is_merge != bool(files):
        raise UserError("--merge: needs files to merge, such as: gradtrail review --merge ann.csv ben.csv")
    corrections = folder / file if file else Path("pipeline/corrections.csv")
    if is_merge:
        merge([folder / name for name in files], corrections)
    else:
        review(corrections, **options)


@gradtrail.command(epilog="Example: gradtrail sync --verbose")
@click.option("--verbose", "-v", is_flag=True, help="Also report states whose files are missing.")
@click.option("--restore", metavar="RUN", help="Deleted run to bring back: its id, first digits of the id, or name.")
def sync(*, verbose: bool, restore: str | None) -> None:
    """Add the missing MLflow runs of all commits and experiments.

    Runs are rebuilt from the outputs in DVC's cache. Does nothing if nothing has changed since the last sync. A run
    that you delete in MLflow stays deleted until its state runs again.
    """
    from gradtrail.tracking import sync as syncing

    report = syncing.restore(restore) if restore else syncing.sync()
    print(syncing.describe(report, verbose=verbose))


@gradtrail.command(epilog="Example: gradtrail gc --yes")
@click.option("--yes", is_flag=True, help="Remove without asking.")
def gc(*, yes: bool) -> None:
    """Remove what no recorded state needs.

    Lists runs, artifacts and checkpoints, and asks before it removes them.
    """
    from gradtrail.tracking.gc import collect_garbage

    collect_garbage(yes=yes)


@gradtrail.command(epilog="Example: gradtrail compare --params train.seed=0,1,2 train.precision=float32,bfloat16")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--params", "is_params", is_flag=True, help="Take a grid KEY=VALUE,VALUE... in place of NAMEs.")
@click.option("--seeds", type=_seeds, metavar="LIST", help="Seeds of the training.  [default: those of the entry]")
@click.option("--all", "is_all", is_flag=True, help="Print the results of all entries, and run nothing.")
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option(
    "--jobs", type=_COUNT, default=1, metavar="N", help="Parallel trainings in DVC's queue, or trials of a search."
)
@click.option(
    "--on",
    metavar="ADDRESS",
    help="Ray job server to run on, such as http://HOST:8265, or `local` for a Ray on this machine."
    "  [default: RAY_API_SERVER_ADDRESS, or else DVC's queue]",
)
@click.option("--cpus", type=_AMOUNT, default=1, metavar="N", help="Cores per training, with --on.")
@click.option("--gpus", type=_AMOUNT, default=0, metavar="N", help="GPUs per training, with --on.")
def compare(
    names: tuple[str, ...], *, is_params: bool, is_all: bool, seeds: list[int] | None, markdown: bool, **place: Any
) -> int:
    """Compare variants of the training over seeds.

    Runs the missing trainings of entries of experiments.yaml and prints their results. Without a NAME, lists the
    entries, what is there of each, and what the rest would take.
    """
    from gradtrail.cluster.engine import engine
    from gradtrail.experiments.compare.main import list_entries, print_results, run_comparison
    from gradtrail.experiments.compare.queue import DvcQueue
    from gradtrail.experiments.compare.spec import Comparison, choose, parse_params

    if is_params and not names:
        raise UserError("--params: needs KEY=VALUE,VALUE..., such as: gradtrail compare --params train.seed=0,1,2")
    if not names:
        print_results(seeds, markdown=markdown) if is_all else list_entries()
        return 0
    jobs = place.pop("jobs")
    on = engine(**place) or DvcQueue(jobs)
    if isinstance(on, DvcQueue):
        require_jax()
    statuses = []
    for name, entry in ({"": parse_params(names)} if is_params else {name: choose(name) for name in names}).items():
        if isinstance(entry, Comparison):
            statuses.append(run_comparison(entry, on, seeds, markdown=markdown))
        else:
            from gradtrail.experiments import search  # late: Optuna takes half a second

            statuses.append(search.run(name, entry, on, jobs))
    return max(statuses)


@gradtrail.command("what-if", epilog="Example: gradtrail what-if --test 4201 --subsets 10")
@click.option("--test", type=click.IntRange(min=0), multiple=True, metavar="ID", help="Test example; repeatable.")
@click.option("--drop", type=_PATH, metavar="FILE", help="CSV file with a column example_id: examples to remove.")
@click.option("--suspects", is_flag=True, help="Give suspected label errors their proposed labels.")
@click.option("--subsets", type=click.IntRange(min=3), default=20, metavar="N", help="Random subsets.")
@click.option("--fraction", type=_SHARE, default=0.01, metavar="F", help="Size of a subset.")
@click.option("--jobs", type=_COUNT, default=1, metavar="N", help="Parallel trainings.")
@click.pass_obj
def what_if(folder: Path, /, *, drop: Path | None, jobs: int, **options: Any) -> int:
    """Predict what removing training examples changes, and check it by retraining.

    By default, removes the examples that support each of a few mistakes. Random subsets show how good the predictions
    are. `--test` also sets `what_if.test_examples` in pipeline/what_if/params.yaml.
    """
    require_jax()
    from gradtrail.experiments.compare.queue import DvcQueue
    from gradtrail.experiments.what_if import what_if

    return what_if(DvcQueue(jobs), drop=folder / drop if drop else None, **options)


@gradtrail.command(epilog="Example: gradtrail diff HEAD workspace")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--stage", metavar="STAGE", help="Stage of both runs, such as gradients.  [default: train]")
@click.option("--json", "form", flag_value="json", help="Print everything as JSON.")
@click.option("--markdown", "form", flag_value="markdown", help="Print Markdown, such as for a pull request.")
@click.option("--time", "is_timed", is_flag=True, help="Also run both trainings, and print how much slower B is.")
@_seconds("--time")
@_interpreter("--python-a", "A, with --time")
@_interpreter("--python-b", "B, with --time")
def diff(before: str, after: str, *, is_timed: bool, python_a: Path, python_b: Path, **options: Any) -> None:
    """Compare two runs: metrics, params, code, seconds, memory, and the costs of each compiled function.

    A and B are ids or names of runs, states, DVC experiments, commits or `workspace`; A@2 is the second execution.
    """
    from gradtrail.experiments.diff import diff

    if is_timed:
        require_jax()
    diff(before, after, pythons=[python_a, python_b] if is_timed else None, **options)


for _verb in serving.VERBS:
    gradtrail.add_command(_verb)


@gradtrail.command(epilog="Example: gradtrail gate --accept")
@click.option("--accept", is_flag=True, help="Accept the current costs.")
def gate(*, accept: bool) -> int:
    """Compare the costs of compiled functions with the accepted costs.

    The costs are static: FLOPs, bytes, instructions. benchmarks/accepted_costs.json has the accepted ones.
    """
    require_jax()
    from gradtrail.experiments.cost_gate import run_gate

    return run_gate(accept=accept)


@gradtrail.command(epilog="Example: gradtrail upgrade jax==0.12.0.1 flax==0.12.12")
@click.argument("packages", nargs=-1, required=True, metavar="PACKAGE==VERSION...")
@_seconds("timing")
@_interpreter("--python", "the new environment")
def upgrade(packages: tuple[str, ...], *, seconds: float, python: Path) -> None:
    """Rehearse other versions of packages: programs, outputs, accuracy and time. Changes no file of the project."""
    require_jax()
    from gradtrail.experiments.upgrade import upgrade

    upgrade(packages, python=python, seconds=seconds)


@gradtrail.command(epilog="Example: gradtrail versions")
def versions() -> None:
    """Record the installed package versions in pipeline/versions.yaml and pipeline/networks/versions.yaml."""
    from gradtrail.stages.common.versions import write_installed_versions

    for package, version in write_installed_versions().items():
        print(f"{package} {version}")
