"""`gradtrail predict`: classify images with an exported model; print a few answers, or write any number to a table.

A table streams into a file that takes the target's name once it is complete. It depends only on the images and the
model.
"""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import UInt8
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gradtrail.core.xla.passes import fitting_size
from gradtrail.serving.images import decode_image
from gradtrail.serving.registry import resolve
from gradtrail.stages.common import plotting
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.model.exported import ExportedModel, Manifest, are_probabilities, read_export
from gradtrail.support.errors import UserError, one_line, suggestion
from gradtrail.support.progress import progress_bar, stdout_console
from gradtrail.support.running_time import allowed_cores

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
COLUMN = "image"
BATCH_SIZE = 256  # largest number of images per call of the model
BATCHES_PER_GROUP = 64  # of rows in the table
TEXTS = ["path", "class", "error"]
PIXEL_BATCHES = 16  # batches of pixels that are read together
_MAX_THREADS = 4  # Pillow runs Python for most of the time that it takes for a small image

Images = UInt8[np.ndarray, "images height width *channels"]
Sources: TypeAlias = Sequence[Path | bytes | None] | Images  # image files, or their bytes (None: missing), or pixels
Batch: TypeAlias = tuple[dict[str, pa.Array], Sources]  # columns `path` and `index`, and the images


def predict(
    paths: Sequence[Path], model: str, project: Path, *, figure: Path | None = None, out: Path | None = None
) -> int:
    """Print the answers to image files, or write the answers to images, folders and parquet files to a table.

    The model is a folder with an export, or the URI of a model in the registry, such as `models:/digits@champion`.
    Returns the exit status: 2 if an image has no answer.
    """
    if figure and out:
        raise UserError("--figure: only without --out")
    for path in [] if out else paths:
        if path.is_dir() or _is_parquet(path):
            raise UserError(f"{path}: a folder or table of images; --out FILE.parquet takes the answers")
    folder = project.absolute()
    with contextlib.chdir(folder if model.startswith("models:/") else "."):
        reference = resolve(model, folder / ".gradtrail" / "exports")
    exported = read_export(reference.folder)
    num_errors = predict_into(out, paths, exported, reference.version) if out else _print(paths, exported, figure)
    return 2 if num_errors else 0


def _print(paths: Sequence[Path], model: ExportedModel, figure: Path | None) -> int:
    """Print the label of each image; on a terminal also the image as the network sees it.

    Images that cannot be used are reported on stderr, after the answers for the others; returns their number.
    """
    manifest = model.manifest
    images, errors = _decode(paths, manifest)
    usable = [index for index, error in enumerate(errors) if error is None]
    if usable:
        names, images = [paths[index] for index in usable], images[usable]
        probabilities, classes, console = model.predict(images), manifest.classes, stdout_console()
        for path, image, row in zip(names, images, probabilities, strict=True):
            if console.is_terminal:
                _print_image(image, console)
            first, *next_labels = np.argsort(row)[::-1][:3]
            then = ", ".join(f"{classes[label]} {row[label]:.1%}" for label in next_labels)
            console.print(f"{path}: {classes[first]}  {row[first]:.1%}  (then {then})", soft_wrap=True, markup=False)
        mean = f"the mean of {len(manifest.seeds)} networks, " if len(manifest.seeds) > 1 else ""
        fitted = f"temperature {manifest.temperature:.3g}, fitted to {manifest.validation_images:,} images"
        console.print(f"probabilities are {mean}calibrated ({fitted})", soft_wrap=True)
        if figure:
            _draw(names, images, probabilities, manifest, figure)
    for path, error in zip(paths, errors, strict=True):
        if error:
            print(f"gradtrail: {path}: {error}", file=sys.stderr)
    return len(paths) - len(usable)


def _print_image(pixels: UInt8[np.ndarray, "height width *channels"], console: Console) -> None:
    """Print an image, two pixels per character, scaled down to the width of the terminal."""
    image = Image.fromarray(pixels)
    small = image.reduce(math.ceil(image.width / console.width))
    has_colors = console.color_system in ("truecolor", "256")
    rows = np.asarray((small if has_colors else small.convert("L")).convert("RGB"))
    rows = np.pad(rows, [(0, len(rows) % 2), (0, 0), (0, 0)])
    for upper, lower in zip(rows[::2], rows[1::2], strict=True):
        line = Text()
        for top, bottom in zip(upper, lower, strict=True):
            line.append("▀", Style(color=Color.from_rgb(*top), bgcolor=Color.from_rgb(*bottom)))
        console.print(line)


def _draw(paths: Sequence[Path], images: Images, probabilities: np.ndarray, manifest: Manifest, to: Path) -> None:
    """Draw each image as the network sees it, next to the probabilities of all classes."""
    title = f"{manifest.model}, {manifest.weights} weights on {manifest.dataset}"
    size = (plotting.NARROW_INCHES, 1 + 2 * len(images))
    figure, axes = plotting.new_figure(title, rows=len(images), columns=2, size=size)
    for (picture, bars), path, image, row in zip(axes, paths, images, probabilities, strict=True):
        picture.imshow(image, cmap="gray", vmin=0, vmax=255)
        picture.set(title=path.name.replace("$", r"\$"), xticks=[], yticks=[])
        picture.grid(visible=False)
        colours = [plotting.VERMILLION if label == row.argmax() else plotting.GREY for label in range(len(row))]
        bars.bar(range(len(row)), row, color=colours)
        label = plotting.short(manifest.classes[row.argmax()]).replace("$", r"\$")
        bars.set(title=f"{label}: {row.max():.1%}", ylim=(0, 1), ylabel="probability")
        plotting.name_classes(bars, manifest.classes, sides="x")
    with atomic_file(to) as temporary:
        plotting.save(figure, temporary)


def predict_into(out: Path, paths: Sequence[Path], model: ExportedModel, version: str | None = None) -> int:
    """Write the answers to images to a parquet file; print and return how many images have none.

    The columns are those of `docs/release.md`. The schema's metadata name the model, and its version in the registry.
    """
    started = time.perf_counter()
    if out.is_dir():
        raise UserError(f"{out}: a folder; name a file, such as {out / 'predictions.parquet'}")
    if any(path.exists() and out.exists() and path.samefile(out) for path in paths):
        raise UserError(f"{out}: is one of the inputs; name another file")
    files = _list_files(paths)
    num_images = sum(_count_images(file, model.manifest.image_shape) for file in files)
    if not num_images:
        raise UserError(f"{', '.join(map(str, paths))[:200]}: no images ({', '.join(SUFFIXES)})")

    num_errors = 0
    metadata = {
        "gradtrail.model": f"{model.manifest.name}{f' version {version}' if version else ''}",
        "gradtrail.model_digest": model.manifest.digest,
        "gradtrail.classes": json.dumps(model.manifest.classes),
    }
    answers = _answers(_read_batches(files, model.manifest.image_shape), model)
    first = next(answers)
    answers = itertools.chain([first], answers)
    with (
        progress_bar("predict", num_images, unit="steps") as bar,
        atomic_file(out) as temporary,
        # Floats hardly repeat, so a dictionary would only take time
        pq.ParquetWriter(temporary, first.schema.with_metadata(metadata), use_dictionary=TEXTS) as writer,
    ):
        while tables := [*itertools.islice(answers, BATCHES_PER_GROUP)]:
            table = pa.concat_tables(tables)
            writer.write_table(table, row_group_size=len(table))
            num_errors += len(table) - table["error"].null_count
            bar.advance(len(table), message=out.name)

    rate = f"{num_images / (time.perf_counter() - started):,.0f} images/s"
    errors = f", {num_errors:,} of them without an answer (column error)" if num_errors else ""
    stdout_console().print(f"{out}: {num_images:,} images{errors}; {rate}", soft_wrap=True)
    return num_errors


def _list_files(paths: Sequence[Path]) -> list[Path]:
    """Replace folders by the image files in them, at any depth, sorted."""
    files = list[Path]()
    for path in paths:
        is_folder = path.is_dir()
        files += sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES) if is_folder else [path]
    return files


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet" and not path.is_dir()


def _count_images(path: Path, shape: tuple[int, ...]) -> int:
    """Return the number of images in a file; raise UserError if a parquet file has no column of images."""
    if not _is_parquet(path):
        return 1
    with _open_parquet(path) as file:
        schema = file.schema_arrow
        if COLUMN not in schema.names:
            near = suggestion(COLUMN, schema.names)
            raise UserError(f"{path}: has no column {COLUMN!r}; it has {', '.join(schema.names)[:200]}{near}")
        dtype, pixels = schema.field(COLUMN).type, pa.binary(math.prod(shape))
        if dtype not in (pa.binary(), pa.large_binary(), pixels):
            raise UserError(f"{path}: column {COLUMN} is {dtype}; must be binary (image files) or {pixels} (pixels)")
        return file.metadata.num_rows


@contextlib.contextmanager
def _open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {one_line(error)[:200]}") from None


def _read_batches(files: Sequence[Path], shape: tuple[int, ...]) -> Iterator[Batch]:
    """Yield the images in batches, the last one of a parquet file or of consecutive image files may be smaller."""
    for is_parquet, group in itertools.groupby(files, _is_parquet):
        while not is_parquet and (images := [*itertools.islice(group, BATCH_SIZE)]):
            yield {"path": pa.array(map(_as_text, images)), "index": pa.nulls(len(images), pa.int64())}, images
        for path in group:
            with _open_parquet(path) as file:
                start, is_pixels = 0, pa.types.is_fixed_size_binary(file.schema_arrow.field(COLUMN).type)
                size = BATCH_SIZE * PIXEL_BATCHES if is_pixels else BATCH_SIZE
                for batch in file.iter_batches(size, columns=[COLUMN], use_threads=False):
                    (column,), end = batch.columns, start + len(batch)
                    keys = {"path": pa.repeat(_as_text(path), len(batch)), "index": pa.array(np.arange(start, end))}
                    yield keys, _pixels(column, shape) if is_pixels else column.to_pylist()
                    start = end


def _pixels(column: pa.FixedSizeBinaryArray, shape: tuple[int, ...]) -> Images:
    """Return the pixels of a column without a copy."""
    if column.null_count:
        raise pa.ArrowInvalid(f"column {COLUMN} has pixels that are null")
    pixels = np.frombuffer(column.buffers()[1], np.uint8).reshape(-1, *shape)
    return pixels[column.offset : column.offset + len(column)]


def _as_text(path: Path) -> str:
    """Return a path as UTF-8, which file names need not be."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _decode(sources: Sources, manifest: Manifest) -> tuple[Images, list[str | None]]:
    """Return images in the form of the model's, and why each of them cannot be used, or None."""
    if isinstance(sources, np.ndarray):
        return sources, [None] * len(sources)
    images, errors = np.zeros((len(sources), *manifest.image_shape), np.uint8), list[str | None]()
    for image, source in zip(images, sources, strict=True):
        try:
            if source is None:
                raise UserError("no image")
            file = io.BytesIO(source) if isinstance(source, bytes) else source
            image[:] = decode_image(file, manifest.image_shape, manifest.dataset)
            errors.append(None)
        except UserError as error:
            errors.append(str(error))
    return images, errors


def _answer(batch: Batch, model: ExportedModel, size: int) -> pa.Table:
    """Return the rows of a batch, by a model that is compiled for this number of images."""
    keys, sources = batch
    images, errors = _decode(sources, model.manifest)
    padding = -len(images) % size
    padded = np.pad(images, [(0, padding), *[(0, 0)] * (images.ndim - 1)]) if padding else images
    answers = [model.run(padded[start : start + size]) for start in range(0, len(padded), size)]
    probabilities = np.concatenate(answers)[: len(images)]
    for index in map(int, np.flatnonzero(~are_probabilities(probabilities))):
        errors[index] = errors[index] or "the model's answer is not a probability for each class"

    is_error = np.array([error is not None for error in errors])
    labels = pa.array(probabilities.argmax(axis=1).astype(np.int32), mask=is_error)
    flat = np.where(is_error[:, None], np.float32(np.nan), probabilities).ravel()  # Arrow's parquet loses null lists
    columns = {
        "label": labels,
        "class": pa.array(model.manifest.classes).take(labels),
        "confidence": pa.array(probabilities.max(axis=1), mask=is_error),
        "probabilities": pa.FixedSizeListArray.from_arrays(flat, probabilities.shape[1]),
        "error": pa.array(errors, pa.string()),
    }
    return pa.table(keys | columns)


def _answers(batches: Iterator[Batch], model: ExportedModel) -> Iterator[pa.Table]:
    """Yield the rows of each batch, in their order; some threads decode images while the model computes."""
    size = fitting_size(BATCH_SIZE, model.compile)
    answer, num_threads = functools.partial(_answer, model=model, size=size), min(_MAX_THREADS, allowed_cores())
    with ThreadPoolExecutor(num_threads, "predict") as pool:
        queue = deque(pool.submit(answer, batch) for batch in itertools.islice(batches, num_threads + 1))
        while queue:
            yield queue.popleft().result()
            queue.extend(pool.submit(answer, batch) for batch in itertools.islice(batches, 1))
