"""Predict any number of images into a parquet file: streamed, in parts, and resumed after a kill.

A finished part is a file in `.NAME.parts` next to the target; at the end the parts are joined and removed. The output
depends only on the images and the model: a run that was killed and resumed writes the same bytes.
"""

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from jax import Array
from jaxtyping import Float

from gradtrail.serving.predict.decoding import Decoded, decode_batches
from gradtrail.serving.predict.images import framing_of
from gradtrail.serving.predict.sources import Source, open_sources
from gradtrail.stages.artifacts.exported import ExportedModel, Manifest, are_probabilities
from gradtrail.stages.common.files import atomic_file, write_json
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.progress import progress_bar, stdout_console

BATCH_SIZE = 256  # images per call of the model
PART_SIZE = 64 * BATCH_SIZE  # images per part, which a kill may cost
_NO_PROBABILITIES = "the model's answer is not a probability for each class"

Probabilities = Float[np.ndarray, "images classes"]


def predict_into(out: Path, paths: Sequence[Path], model: ExportedModel, version: str | None = None) -> int:
    """Predict images into a parquet file, with a progress bar; prints the number of images and the rate.

    Columns: `path`; `index` (the index of the image in a parquet file, else null); `label` (int32); `class`, its name;
    `confidence` (float32), its probability; `probabilities` (float32, one per class); `error`, why an image has no
    answer: then label, class and confidence are null and the probabilities NaN. The schema's metadata name the model.

    Args:
        out: Parquet file to write; replaced at the end if it exists.
        paths: Image files, folders with image files at any depth, parquet files.
        model: Exported model.
        version: Version of the model in the registry, for the metadata.

    Returns:
        The number of images without an answer.

    Raises:
        UserError: The paths have no images, a table is damaged, another process writes the same file, or there are
            parts of other images or of another model; one line.
    """
    manifest, started = model.manifest, time.perf_counter()
    if out.is_dir():
        raise UserError(f"{out}: a folder; name a file, such as {out / 'predictions.parquet'}")
    if any(path.exists() and out.exists() and path.samefile(out) for path in paths):
        raise UserError(f"{out}: is one of the inputs; name another file")
    parts = out.with_name(f".{out.name}.parts")
    with open_sources(paths) as sources, _lock(parts):
        _check_parts(parts, manifest, sources)
        schema = _schema(manifest, version)
        files, num_new = _predict_parts(parts, sources, model, schema)
        num_images, num_errors = _join(files, out, schema)
        shutil.rmtree(parts)
    rate = f"; {num_new / (time.perf_counter() - started):,.0f} images/s" if num_new else ""
    errors = f", {num_errors:,} of them without an answer (column error)" if num_errors else ""
    stdout_console().print(f"{out}: {num_images:,} images{errors}{rate}", soft_wrap=True)
    return num_errors


@contextlib.contextmanager
def _lock(parts: Path) -> Iterator[None]:
    parts.parent.mkdir(parents=True, exist_ok=True)
    path = parts.with_suffix(".lock")
    try:
        with FileLock(path, timeout=0):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    except Timeout:
        raise UserError(f"{parts}: another process is writing it") from None


def _check_parts(parts: Path, manifest: Manifest, sources: Sequence[Source]) -> None:
    """Write the inputs of the parts to a file, or check that existing parts have the same inputs."""
    identities = "\n".join(source.identity for source in sources)
    inputs = {
        "model": manifest.digest,
        "images": hashlib.sha256(identities.encode()).hexdigest(),
        "sizes": [BATCH_SIZE, PART_SIZE],
    }
    path = parts / "about.json"
    if not path.exists() and not any(parts.glob("*.arrow")):  # a new run, or one that was killed at the start
        write_json(path, inputs)
        return
    try:
        existing = json.loads(path.read_text())
    except (OSError, ValueError):
        existing = {}
    if existing != inputs:
        words = {"model": "another model", "images": "other images"}
        differing = [name for key, name in words.items() if existing.get(key) != inputs[key]] or ["another version"]
        raise UserError(f"{parts}: was started with {' and '.join(differing)}; remove it to start again")


def _predict_parts(
    parts: Path, sources: Sequence[Source], model: ExportedModel, schema: pa.Schema
) -> tuple[list[Path], int]:
    """Write the missing parts; return all parts in order, and the number of images in the missing ones."""
    files, num_new = list[Path](), 0
    with progress_bar("predict", sum(source.num_images for source in sources), unit="steps") as bar:
        for source in sources:
            num_parts = len(range(0, source.num_images, PART_SIZE))
            source_files = [parts / f"{len(files) + number:06d}.arrow" for number in range(num_parts)]
            files += source_files
            num_finished = next((number for number, file in enumerate(source_files) if not file.exists()), num_parts)
            bar.advance(min(num_finished * PART_SIZE, source.num_images))
            if num_finished == num_parts:
                continue
            answers = _answers(source, num_finished * PART_SIZE, model)
            for file in source_files[num_finished:]:
                table = _table([*islice(answers, PART_SIZE // BATCH_SIZE)], model.manifest, schema)
                with atomic_file(file) as temporary, pa.ipc.new_file(temporary, schema) as writer:
                    writer.write_table(table)
                bar.advance(len(table), message=file.stem)
                num_new += len(table)
    return files, num_new


def _answers(source: Source, start: int, model: ExportedModel) -> Iterator[tuple[Decoded, Probabilities]]:
    """Yield batches with their probabilities; the next batch is read and decoded while the model computes."""
    manifest = model.manifest
    model.compile(BATCH_SIZE)
    running: tuple[Decoded, Array] | None = None
    batches = source.batches(start, BATCH_SIZE)
    for batch in decode_batches(batches, manifest.image_shape, framing_of(manifest.dataset)):
        padding = BATCH_SIZE - len(batch.images)
        images = np.pad(batch.images, [(0, padding), (0, 0), (0, 0)]) if padding else batch.images
        started = batch, model.run(images)
        if running:
            yield _finish(*running)
        running = started
    if running:
        yield _finish(*running)


def _finish(batch: Decoded, answers: Array) -> tuple[Decoded, Probabilities]:
    """Return a batch with its probabilities; an answer that is no probability is an error of its image."""
    probabilities = np.asarray(answers)[: len(batch.images)]
    invalid = map(int, np.flatnonzero(~are_probabilities(probabilities)))
    return replace(batch, errors=dict.fromkeys(invalid, _NO_PROBABILITIES) | batch.errors), probabilities


def _schema(manifest: Manifest, version: str | None) -> pa.Schema:
    metadata = {
        "gradtrail.model": f"{manifest.name}{f' version {version}' if version else ''}",
        "gradtrail.model_digest": manifest.digest,
        "gradtrail.network": manifest.model,
        "gradtrail.dataset": manifest.dataset,
        "gradtrail.classes": json.dumps(manifest.classes),
    }
    types: Mapping[str, Any] = {
        "path": pa.string(),
        "index": pa.int64(),
        "label": pa.int32(),
        "class": pa.string(),
        "confidence": pa.float32(),
        "probabilities": pa.list_(pa.float32(), len(manifest.classes)),
        "error": pa.string(),
    }
    return pa.schema([*types.items()], metadata=metadata)


def _table(answers: Sequence[tuple[Decoded, Probabilities]], manifest: Manifest, schema: pa.Schema) -> pa.Table:
    """Return the rows of a part."""
    probabilities = np.concatenate([part for _, part in answers])
    count, first = len(probabilities), answers[0][0].batch
    errors = [batch.errors.get(index) for batch, part in answers for index in range(len(part))]
    is_error = np.array([error is not None for error in errors])
    labels = probabilities.argmax(axis=1).astype(np.int32)
    flat = np.where(is_error[:, None], np.float32(np.nan), probabilities).ravel()
    if first.first is None:
        paths = pa.array([path for batch, _ in answers for path in batch.batch.paths])
        index = pa.nulls(count, pa.int64())
    else:
        paths, index = pa.repeat(first.paths[0], count), pa.array(np.arange(first.first, first.first + count))
    columns = [
        paths,
        index,
        pa.array(labels, mask=is_error),
        pa.array(manifest.classes).take(pa.array(labels, mask=is_error)),
        pa.array(probabilities.max(axis=1), mask=is_error),
        pa.FixedSizeListArray.from_arrays(flat, len(manifest.classes)),  # Arrow's parquet loses null lists
        pa.array(errors, pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _join(files: Sequence[Path], out: Path, schema: pa.Schema) -> tuple[int, int]:
    """Join parts into one file, a row group each; return the numbers of images and of images without an answer."""
    num_images = num_errors = 0
    texts = ["path", "class", "error"]  # floats hardly repeat, so a dictionary would only take time
    with atomic_file(out) as temporary, pq.ParquetWriter(temporary, schema, use_dictionary=texts) as writer:
        for file in files:
            try:
                table = pa.ipc.open_file(file).read_all()
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"{file}: damaged: {one_line(error)[:200]}; remove it and try again") from None
            num_images += len(table)
            num_errors += len(table) - table["error"].null_count
            writer.write_table(table, row_group_size=PART_SIZE)
    return num_images, num_errors
