"""`gradtrail predict`: classify images with an exported model; print a few answers, or write any number to a table."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gradtrail.serving.predict.images import framing_of, read_image
from gradtrail.serving.predict.sources import is_parquet
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.artifacts.exported import ExportedModel, Manifest, read_export
from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console

_NUM_CLASSES = 3  # in a line

Images = UInt8[np.ndarray, "images height width"]
Probabilities = Float[np.ndarray, "images classes"]


def predict(
    paths: Sequence[Path], model: str, project: Path, *, figure: Path | None = None, out: Path | None = None
) -> int:
    """Classify images: print each one's label with its probability, or write all answers to a parquet file.

    Args:
        paths: Image files; with `out` also folders and parquet files.
        model: Folder with an exported model, or URI of a model in the registry, such as `models:/digits@champion`.
        project: Folder of the project, with the store and its caches.
        figure: PNG to draw with the images and all probabilities; None for no figure.
        out: Parquet file to write; None to print.

    Returns:
        The exit status: 2 if an image cannot be used.

    Raises:
        UserError: The model cannot be used, or a path is no image file; one line.
    """
    if out is None:
        for path in paths:
            if path.is_dir() or is_parquet(path):
                raise UserError(f"{path}: a folder or table of images; --out FILE.parquet takes the answers")
        return _print_few(paths, _open(model, project)[0], figure)
    from gradtrail.serving.predict.batch import predict_into

    if figure:
        raise UserError("--figure: only without --out")
    exported, version = _open(model, project)
    return 2 if predict_into(out, paths, exported, version) else 0


def _open(model: str, project: Path) -> tuple[ExportedModel, str | None]:
    """Return a model with its version in the registry."""
    from gradtrail.serving.registry import resolve

    folder = project.absolute()
    with contextlib.chdir(folder if model.startswith("models:/") else "."):
        reference = resolve(model, folder / ".gradtrail" / "exports")
    return read_export(reference.folder), reference.version


def _print_few(paths: Sequence[Path], model: ExportedModel, figure: Path | None) -> int:
    """Print the label of each image; on a terminal also the image as the network sees it.

    An image that cannot be used is reported on stderr, after the answers for the others.
    """
    manifest = model.manifest
    images, errors = {}, list[UserError]()
    for path in paths:
        try:
            images[path] = read_image(path, manifest.image_shape, framing_of(manifest.dataset))
        except UserError as error:
            errors.append(error)
    if images:
        _answer(images, model, figure)
    for line in errors:
        print(f"gradtrail: {line}", file=sys.stderr)
    return 2 if errors else 0


def _answer(
    images: Mapping[Path, UInt8[np.ndarray, "height width"]], model: ExportedModel, figure: Path | None
) -> None:
    """Print the labels of images, and draw them."""
    manifest, pixels = model.manifest, np.stack([*images.values()])
    probabilities = model.predict(pixels)
    console = stdout_console()
    for path, image, row in zip(images, pixels, probabilities, strict=True):
        if console.is_terminal:
            _print_image(image, console)
        console.print(f"{path}: {_likeliest(row, manifest.classes)}", soft_wrap=True)
    mean = f"the mean of {len(manifest.seeds)} networks, " if len(manifest.seeds) > 1 else ""
    console.print(f"probabilities are {mean}calibrated (temperature {manifest.temperature:.3g})", soft_wrap=True)
    if figure:
        _draw([*images], pixels, probabilities, manifest, figure)


def _likeliest(probabilities: Float[np.ndarray, " classes"], classes: Sequence[str]) -> str:
    """Return the likeliest classes with their probabilities, as text."""
    first, *next_labels = np.argsort(probabilities)[::-1][:_NUM_CLASSES]
    rest = ", ".join(f"{classes[label]} {probabilities[label]:.1%}" for label in next_labels)
    return f"{classes[first]}  {probabilities[first]:.1%}  (then {rest})"


def _print_image(image: UInt8[np.ndarray, "height width"], console: Console) -> None:
    """Print an image, two pixels per character."""
    rows = np.concatenate([image, np.zeros((image.shape[0] % 2, image.shape[1]), np.uint8)])
    for upper, lower in zip(rows[::2], rows[1::2], strict=True):
        line = Text()
        for top, bottom in zip(upper, lower, strict=True):
            line.append("▀", Style(color=f"rgb({top},{top},{top})", bgcolor=f"rgb({bottom},{bottom},{bottom})"))
        console.print(line)


def _draw(paths: Sequence[Path], images: Images, probabilities: Probabilities, manifest: Manifest, to: Path) -> None:
    """Draw each image as the network sees it, next to the probabilities of all classes."""
    title = f"{manifest.model}, {manifest.weights} weights on {manifest.dataset}"
    size = (plotting.NARROW_INCHES, 1 + 2 * len(images))
    figure, axes = plotting.new_figure(title, rows=len(images), columns=2, size=size)
    classes = manifest.classes
    rotation = 90 if max(map(len, classes)) > 2 else 0
    for (picture, bars), path, image, row in zip(axes, paths, images, probabilities, strict=True):
        picture.imshow(image, cmap="gray", vmin=0, vmax=255)
        picture.set(title=path.name, xticks=[], yticks=[])
        picture.grid(visible=False)
        colours = [plotting.VERMILLION if label == row.argmax() else plotting.GREY for label in range(len(row))]
        bars.bar(range(len(row)), row, color=colours)
        bars.set(title=f"{classes[row.argmax()]}: {row.max():.1%}", ylim=(0, 1), ylabel="probability")
        bars.set_xticks(range(len(row)), classes, rotation=rotation)
    with atomic_file(to) as temporary:
        plotting.save(figure, temporary)
