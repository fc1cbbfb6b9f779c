"""The verbs about exported models; each imports its package when it is called."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gradtrail.stages.common.environment import require_jax
from gradtrail.support.paths import find_project
from gradtrail.support.verb import Verb

_PATH = click.Path(path_type=Path)
_SECONDS = click.FloatRange(0, 3600, min_open=True)
_REASON = click.option(
    "--reason", default="", show_default=False, metavar="TEXT", help="Reason, for a tag of the version."
)


def _share(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Return a share, such as 10% or 0.1, as a number."""
    if value is None:
        return None
    try:
        share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise click.BadParameter(f"must be above 0% and at most 100%, got {value!r}")
    return share


@click.command(  # stays in its folder, where the images are
    short_help="Classify images with the exported model.",
    epilog="Example: gradtrail predict three.png seven.png --figure results/seen.png",
)
@click.argument("images", nargs=-1, required=True, type=_PATH, metavar="IMAGE|FOLDER|FILE.parquet...")
@click.option("--model", metavar="WHICH", help="A folder, or models:/NAME@ALIAS.  [default: models/export]")
@click.option(
    "--out", type=_PATH, metavar="FILE.parquet", help="Write the answers to this table; any number of images."
)
@click.option("--figure", type=_PATH, metavar="FILE.png", help="Draw the images as the network sees them.")
def predict(*, images: tuple[Path, ...], model: str | None, out: Path | None, figure: Path | None) -> int:
    """Classify images with the exported model.

    Prints labels and probabilities; images that cannot be used are reported after the others, with exit status 2. With
    --out, folders and parquet files (column image: bytes of image files, or pixels) are read too, and the answers
    stream into a table.
    """
    project = Path(os.path.relpath(find_project(Path.cwd())))
    with contextlib.chdir(project):
        require_jax()
    from gradtrail.serving.predict import predict

    model = model or str(project / "models" / "export")
    return predict(images, model, project, figure=figure, out=out)


@click.command(cls=Verb, epilog="Example: gradtrail serve --model models/export --port 8080")
@click.option("--model", metavar="WHICH", help="The model.  [default: models:/<export.name>@champion]")
@click.option(
    "--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on; others need GRADTRAIL_TOKEN."
)
@click.option("--port", type=click.IntRange(0, 2**16 - 1), default=8080, help="0 for a free one.")
@click.option(
    "--max-wait-ms", type=click.FloatRange(0, 1000), default=2, help="Longest wait of a batch for more requests."
)
@click.option("--max-images", type=click.IntRange(1, 2**20), default=1024, help="Largest number of images per request.")
@click.option("--max-body-mib", type=click.FloatRange(0.001, 1024), default=16, help="Largest body of a request.")
@click.option(
    "--max-requests",
    type=click.IntRange(1, 2**16),
    default=256,
    help="Largest number of requests in progress; others get 429.",
)
@click.option("--max-seconds", type=_SECONDS, default=30, help="Time limit of a request; then it gets 504.")
@click.option("--drain-seconds", type=_SECONDS, default=10, help="Grace period for running requests after SIGTERM.")
@click.option(
    "--follow-seconds", type=click.FloatRange(0, 3600), default=5, help="Time between two checks of an alias; 0: none."
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Precision, of export.precisions; with --canary or --shadow that of a challenger with the same weights.",
)
@click.option("--challenger", metavar="MODEL", help="A model on trial, such as @challenger; with --canary or --shadow.")
@click.option(
    "--canary", callback=_share, metavar="SHARE", help="Share of clients that the challenger answers, such as 10%."
)
@click.option("--shadow", is_flag=True, help="The challenger answers no client, and is compared on every request.")
@click.option(
    "--compiled", default="", show_default=False, metavar="DIGEST", help="Run the export's machine code if it has this."
)
@click.option(
    "--price-per-hour",
    type=click.FloatRange(0, min_open=True),
    help="Price of the machine, for the cost of 1,000 answers.",
)
@click.option("--access-log", is_flag=True, help="Log each request to stderr.")
@click.pass_obj
def serve(place: Path, /, model: str | None, **options: Any) -> int:
    """Answer requests with an exported model, over HTTP.

    WHICH is models:/NAME@ALIAS, models:/NAME/VERSION, or a folder with an export.
    """
    require_jax()
    from gradtrail.serving.serve import run_server

    return run_server(model, place, options)


@click.command(cls=Verb, epilog="Example: gradtrail verdict workspace")
@click.argument("run", metavar="RUN")
@click.option(
    "--slo", type=_PATH, metavar="FILE", help="File with the limits.  [default: deploy/slo.yaml of the repository]"
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_obj
def verdict(place: Path, run: str, slo: Path | None, *, as_json: bool) -> int:
    """Judge the exported model of a run by the limits of deploy/slo.yaml.

    RUN is the id or name of a run, a state, a DVC experiment, a commit or `workspace`. Measures in fresh processes,
    which takes about a minute. Exit status 0: every limit passes; 1: a limit fails.
    """
    require_jax()
    from gradtrail.serving.verdict import verdict

    return verdict(run, place / slo if slo else Path("deploy/slo.yaml"), as_json=as_json)


@click.command(cls=Verb, epilog="Example: gradtrail promote workspace --champion")
@click.argument("run", metavar="RUN")
@click.option("--champion", is_flag=True, help="Move the alias champion, if the verdict and the comparison allow it.")
@click.option("--force", is_flag=True, help="Move it in any case; the version's tags say so.")
@_REASON
def promote(run: str, *, champion: bool, force: bool, reason: str) -> int:
    """Register the exported model of a run, and move the alias challenger, or champion, to it.

    RUN is a run as for `gradtrail verdict`. Exit status 1: the promotion was refused; the reasons are printed.
    """
    from gradtrail.serving.release import promote

    return _recorded(lambda: promote(run, as_champion=champion, is_forced=force, reason=reason))


@click.command(cls=Verb, epilog="Example: gradtrail rollback --reason slower")
@_REASON
def rollback(*, reason: str) -> int:
    """Move the alias champion back to the previous champion."""
    from gradtrail.serving.release import rollback

    return _recorded(lambda: rollback(reason))


def _recorded(change: Callable[[], int]) -> int:
    """Return the exit status of a change of the registry; what the registry has then is saved on disk."""
    from gradtrail.tracking.registry_history import keep_registry
    from gradtrail.tracking.store import open_store

    keep_registry(open_store())
    status = change()
    keep_registry(open_store())
    return status


@click.command(cls=Verb, epilog="Example: gradtrail export --onnx digits.onnx")
@click.option("--onnx", type=_PATH, metavar="FILE.onnx", help="File to write.")
@click.option("--compiled", type=_PATH, metavar="FOLDER", help="Copy of the export, with compiled programs.")
@click.pass_obj
def export(place: Path, /, *, onnx: Path | None, compiled: Path | None) -> int:
    """Write the exported model for ONNX Runtime, or with compiled programs for this kind of processor.

    --onnx: Its answers are compared with those of models/export first. The first call installs jax2onnx in an
    environment of its own. --compiled: called on several machines, the folder has the programs of each kind.
    """
    if onnx and not compiled:
        from gradtrail.serving.onnx import export_onnx

        return export_onnx(place / onnx)
    if not compiled or onnx:
        raise click.UsageError("name either --onnx or --compiled")
    require_jax()
    from gradtrail.serving.compiled import export_compiled

    return export_compiled(Path("models/export"), place / compiled)


VERBS: list[click.Command] = [predict, export, verdict, promote, rollback, serve]
