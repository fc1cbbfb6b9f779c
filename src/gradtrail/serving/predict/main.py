"""`gradtrail predict`: classify images, after bringing them into the form of the training set."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gradtrail.core.evaluate.calibration import calibrate, pooled
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.xla.compiler import Compiler
from gradtrail.serving.predict.images import framing_of, read_image
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.artifacts.calibration import read_temperature
from gradtrail.stages.artifacts.members import weights_paths
from gradtrail.stages.artifacts.weights import read_weights
from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console

_NUM_SHOWN = 3  # classes


def predict(paths: Sequence[Path], weights: Path, figure: Path | None) -> int:
    """Print the label of each image with its probability; on a terminal also the image as the network sees it.

    An image that cannot be used is reported on stderr, after the answers for the others.

    Args:
        paths: the images.
        weights: a weights file; or the folder `models`, whose members' mean probabilities count.
        figure: where to draw the images and all probabilities, as a PNG; None for no figure.

    Returns:
        The exit status: 2 where an image cannot be used.

    Raises:
        UserError: the weights cannot be used; one line.
    """
    files = [*weights_paths(weights, "final").values()] if weights.is_dir() else [weights]
    networks = [read_weights(path) for path in files]
    model, _, about = networks[0]
    framing = framing_of(about.dataset.name)
    read, faults = {}, list[UserError]()
    for path in paths:
        try:
            read[path] = read_image(path, model.config.image_shape, framing)
        except UserError as error:
            faults.append(error)
    if read:
        title = f"{model.config.name}, {about.title(files[0].stem, len(files))} on {about.dataset.label}"
        temperature = read_temperature(files, _project_of(files[0]) / "results" / "evaluate")
        _answer(read, model, [params for _, params, _ in networks], temperature, title, figure)
    for fault in faults:
        print(f"gradtrail: {fault}", file=sys.stderr)
    return 2 if faults else 0


def _project_of(weights: Path) -> Path:
    """Return the folder whose `models` has a weights file, at any depth."""
    folders = weights.absolute().parents
    return next((folder.parent for folder in folders if folder.name == "models"), folders[0])


def _answer(
    read: Mapping[Path, UInt8[np.ndarray, "height width"]],
    model: Model,
    members: Sequence[Params],
    temperature: float | None,
    title: str,
    to: Path | None,
) -> None:
    """Print the labels of images, and draw them; the temperature is None where none was fitted."""
    images = np.stack([*read.values()])
    call = inference.compile_predict(model, len(images), compiler=Compiler(time.perf_counter))
    labels = np.zeros(len(images), np.int32)
    of_each = [np.asarray(call(params, images, labels)["probabilities"]) for params in members]
    probabilities = calibrate(pooled(of_each), temperature or 1.0)
    console = stdout_console()
    for path, image, row in zip(read, images, probabilities, strict=True):
        if console.is_terminal:
            _show(image, console)
        console.print(f"{path}: {_likeliest(row)}", soft_wrap=True)
    how = "not calibrated: no temperature was fitted for these weights; `dvc repro evaluate` fits one"
    if temperature is not None:
        how = f"calibrated (temperature {temperature:.3g})"
    whose = f"the mean of {len(members)} networks, " if len(members) > 1 else ""
    console.print(f"probabilities are {whose}{how}", soft_wrap=True)
    if to:
        _draw([*read], images, probabilities, title, to)


def _likeliest(probabilities: Float[np.ndarray, " classes"]) -> str:
    """Return the likeliest classes with their probabilities, as text."""
    first, *others = np.argsort(probabilities)[::-1][:_NUM_SHOWN]
    rest = ", ".join(f"{label} {probabilities[label]:.1%}" for label in others)
    return f"{first}  {probabilities[first]:.1%}  (then {rest})"


def _show(image: UInt8[np.ndarray, "height width"], console: Console) -> None:
    """Print an image, two pixels per character."""
    rows = np.concatenate([image, np.zeros((image.shape[0] % 2, image.shape[1]), np.uint8)])
    for upper, lower in zip(rows[::2], rows[1::2], strict=True):
        line = Text()
        for top, bottom in zip(upper, lower, strict=True):
            line.append("▀", Style(color=f"rgb({top},{top},{top})", bgcolor=f"rgb({bottom},{bottom},{bottom})"))
        console.print(line)


def _draw(
    paths: Sequence[Path],
    images: UInt8[np.ndarray, "images height width"],
    probabilities: Float[np.ndarray, "images classes"],
    title: str,
    to: Path,
) -> None:
    """Draw each image as the network sees it, beside the probabilities of all classes."""
    size = (plotting.NARROW_INCHES, 1 + 2 * len(images))
    figure, axes = plotting.new_figure(title, rows=len(images), columns=2, size=size)
    for (seen, bars), path, image, row in zip(axes, paths, images, probabilities, strict=True):
        seen.imshow(image, cmap="gray", vmin=0, vmax=255)
        seen.set(title=path.name, xticks=[], yticks=[])
        seen.grid(visible=False)
        colours = [plotting.VERMILLION if label == row.argmax() else plotting.GREY for label in range(len(row))]
        bars.bar(range(len(row)), row, color=colours)
        bars.set(title=f"{row.argmax()}: {row.max():.1%}", xticks=range(len(row)), ylim=(0, 1), ylabel="probability")
    with atomic_file(to) as temporary:
        plotting.save(figure, temporary)
