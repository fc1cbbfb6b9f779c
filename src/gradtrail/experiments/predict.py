"""`gradtrail predict`: classify images, after bringing them into the form of the training set."""

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, UnidentifiedImageError
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gradtrail.core.evaluate.calibration import calibrate, pooled
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.artifacts.calibration import read_temperature
from gradtrail.stages.artifacts.members import weights_paths
from gradtrail.stages.artifacts.weights import read_weights
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.fetch.catalog import DATASETS, Framing
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.progress import stdout_console

_MAX_PIXELS = 2**24
_FAINT = 0.15  # of the strongest ink; anything fainter is background
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP")  # Pillow reads dozens more, some of them by other programs
_NUM_SHOWN = 3  # classes


def read_image(path: Path, shape: tuple[int, int], framing: Framing | None) -> UInt8[np.ndarray, "height width"]:
    """Return an image in the form of those of a data set.

    Where it is known how these were made, an image of the frame's size is used as it is, inverted if its background is
    bright; any other is processed as they were. MNIST's were scaled to 20 of 28 pixels and shifted until the centre of
    mass of the ink was in the middle (Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits");
    Fashion-MNIST's fill the frame (arXiv 1708.07747). Where it is not known, nothing is inverted or cut: an image of
    another size is scaled as a whole, with its proportions kept, and the rest of the frame gets the colour of its edge.

    Args:
        path: a PNG, JPEG, BMP, TIFF or WebP; transparent parts count as white.
        shape: height and width of the frame, in pixels.
        framing: of the data set.

    Raises:
        UserError: the file is missing, is no image, is too large, or is blank; one line.
    """
    grey = _grey(path)
    if framing is None:
        return np.round(255 * (grey if grey.shape == shape else _whole(grey, shape))).astype(np.uint8)
    ink = _ink(grey)
    if ink.max() < _FAINT / 2:
        raise UserError(f"{path}: the image is blank: nothing contrasts with its background")
    if ink.shape != shape:
        ink = _fitted(ink / ink.max(), shape, framing)
    return np.round(255 * np.clip(ink, 0, 1)).astype(np.uint8)


def _grey(path: Path) -> Float[np.ndarray, "rows columns"]:
    """Return the brightness of an image, from 0 to 1."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=_FORMATS) as image:
            if image.width * image.height > _MAX_PIXELS:
                size = f"{image.width:,} × {image.height:,} pixels"
                raise UserError(f"{path}: {size}, more than {_MAX_PIXELS:,} in all; scale it down first")
            whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnidentifiedImageError:
        raise UserError(f"{path}: not a readable image: none of {', '.join(_FORMATS)}") from None
    except UserError:
        raise
    except Exception as error:  # damage to a file: each of Pillow's readers raises what it meets
        raise UserError(f"{path}: not a readable image: {one_line(error)[:200]}") from None
    return np.asarray(whole.convert("L"), np.float64) / 255


def _ink(grey: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "rows columns"]:
    """Return the amount of ink, 0 for background; the background has the median brightness of the edge."""
    edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    ground = np.median(edge)
    return np.clip(ground - grey, 0, None) / ground if ground > 0.5 else np.clip(grey - ground, 0, None) / (1 - ground)


def _whole(grey: Float[np.ndarray, "rows columns"], shape: tuple[int, int]) -> Float[np.ndarray, "height width"]:
    """Return an image scaled into a frame, in its middle; the rest has the median brightness of its edge."""
    small = _scaled(grey, min(side / length for side, length in zip(shape, grey.shape, strict=True)))
    frame = np.full(shape, np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])))
    top, left = ((side - length) // 2 for side, length in zip(shape, small.shape, strict=True))
    frame[top : top + small.shape[0], left : left + small.shape[1]] = small
    return np.clip(frame, 0, 1)


def _scaled(grey: Float[np.ndarray, "rows columns"], scale: float) -> Float[np.ndarray, "height width"]:
    height, width = (max(1, round(length * scale)) for length in grey.shape)
    return np.asarray(Image.fromarray(grey.astype(np.float32)).resize((width, height), Image.Resampling.BOX))


def _fitted(
    ink: Float[np.ndarray, "rows columns"], shape: tuple[int, int], framing: Framing
) -> Float[np.ndarray, "height width"]:
    """Return the ink scaled and centred in a frame."""
    rows, columns = (np.flatnonzero((ink > _FAINT).any(axis=axis)) for axis in (1, 0))
    cut = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    small = _scaled(cut, framing.share * min(shape) / max(cut.shape))
    size, frame = small.shape, np.zeros(shape)
    weights = [small.sum(axis=1 - axis) if framing.by_mass else np.ones(size[axis]) for axis in (0, 1)]
    start = [_start(weights[axis], size[axis], shape[axis]) for axis in (0, 1)]
    frame[start[0] : start[0] + size[0], start[1] : start[1] + size[1]] = small
    return frame / frame.max()


def _start(ink: Float[np.ndarray, " pixels"], size: int, length: int) -> int:
    """Return the first pixel for which the centre of mass is in the middle, as far as the frame allows it."""
    centre = np.average(np.arange(size) + 0.5, weights=ink)
    return int(np.clip(round(length / 2 - centre), 0, length - size))


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
    dataset = DATASETS.get(about.dataset.name)
    framing = dataset.framing if dataset else None
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
