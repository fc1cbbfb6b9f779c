"""The verbs of a model that is to be used; each imports its package when it is called."""

import os
from pathlib import Path

import click

from gradtrail.support.errors import UserError, with_store
from gradtrail.support.paths import find_project

_PATH = click.Path(path_type=Path)


@click.command(  # stays in its folder, where the images are
    short_help="Classify images with the exported model.",
    epilog="Example: gradtrail predict three.png seven.png --figure seen.png",
)
@click.argument("images", nargs=-1, required=True, type=_PATH, metavar="IMAGE|FOLDER|FILE.parquet|FILE.npz...")
@click.option("--model", metavar="WHICH", help="A folder, or models:/NAME@ALIAS.  [default: models/export]")
@click.option("--out", type=_PATH, metavar="FILE.parquet", help="Write all answers to it; any number of images.")
@click.option("--figure", type=_PATH, metavar="FILE.png", help="Draw the images as the network sees them.")
@click.option("--weights", type=_PATH, hidden=True)
@click.option("--picture", type=_PATH, hidden=True, deprecated="Use --figure.")
def predict(*, images: tuple[Path, ...], model: str | None, out: Path | None, **old: Path | None) -> int:
    """Classify images with the exported model.

    Prints labels and probabilities; images that cannot be used are reported after the others, with exit status 2. With
    --out, folders, parquet files (column image) and npz files (array images) are read too, and the answers stream into
    a table. Run it again after a kill, and it goes on.
    """
    from gradtrail.serving.predict.main import predict

    if old["weights"]:
        raise UserError("--weights: an exported model answers now; name its folder by --model, such as models/export")
    project = Path(os.path.relpath(find_project(Path.cwd())))
    model, figure = model or str(project / "models" / "export"), old["figure"] or old["picture"]
    return with_store(lambda: predict(images, model, project, figure=figure, out=out))


VERBS: list[click.Command] = [predict]
