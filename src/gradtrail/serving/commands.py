"""The verbs of a model that is to be used; each imports its package when it is called."""

import os
from pathlib import Path

import click

from gradtrail.support.paths import find_project

_PATH = click.Path(path_type=Path)


@click.command(
    # stays in its folder, where the images are
    epilog="Example: gradtrail predict three.png seven.png --figure seen.png",
)
@click.argument("images", nargs=-1, required=True, type=_PATH, metavar="IMAGE.png...")
@click.option("--weights", type=_PATH, help="A weights file.  [default: what was trained last, all its members]")
@click.option("--figure", type=_PATH, metavar="FILE.png", help="Draw the images as the network sees them.")
@click.option("--picture", type=_PATH, hidden=True, deprecated="Use --figure.")
def predict(images: tuple[Path, ...], weights: Path | None, figure: Path | None, picture: Path | None) -> int:
    """Classify images with the trained model.

    Images that cannot be used are reported after the others, with exit status 2.
    """
    from gradtrail.serving.predict.main import predict

    weights = weights or Path(os.path.relpath(find_project(Path.cwd()))) / "models"
    return predict(images, weights, figure or picture)


VERBS: list[click.Command] = [predict]
