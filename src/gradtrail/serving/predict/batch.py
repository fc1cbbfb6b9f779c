"""Predict any number of images into a parquet file: streamed, in parts, resumed after a kill.

A finished part is a file in `.NAME.parts` beside the target; at the end they are joined and removed. What is written
depends on the images and the model alone: a run that was killed and resumed writes the same bytes.
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

from gradtrail.serving.predict.decoding import Decoded, decoded
from gradtrail.serving.predict.images import framing_of
from gradtrail.serving.predict.sources import Source, opened
from gradtrail.stages.artifacts.exported import ExportedModel, Manifest, are_probabilities
from gradtrail.stages.common.files import atomic_file, write_json
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.progress import progress_bar, stdout_console

BATCH_SIZE = 256  # images that the model takes at a time
PART_SIZE = 64 * BATCH_SIZE  # images of a part: what a kill may cost
_NO_PROBABILITIES = "the model's answer is not a probability for each class"

Probabilities = Float[np.ndarray, "images classes"]


def predict_into(out: Path, paths: Sequence[Path], model: ExportedModel, version: str | None = None) -> int:
    """Predict images into a parquet file, with a progress bar; one line on stdout tells how many and how fast.

    Columns: `path`; `index` (of the image in a file of many, else null); `label` (int32); `class`, its name;
    `confidence` (float32), its probability; `probabilities` (float32, one of each class); `error`, why an image has no
    answer: label, class and confidence are null and the probabilities NaN then. The schema's metadata name the model.

    Args:
        out: the parquet file to write; what it held is replaced at the end.
        paths: files of images, folders with such files at any depth, parquet files, npz files.
        model: that answers.
        version: of the model in the registry, for the metadata.

    Returns:
        The number of images without an answer.

    Raises:
        UserError: the paths hold no images, a table is damaged, another process writes the same file, or parts of
            other images or of another model are there; one line.
    """
    manifest, started = model.manifest, time.perf_counter()
    if out.is_dir():
        raise UserError(f"{out}: a folder; name a file, such as {out / 'predictions.parquet'}")
    if any(path.exists() and out.exists() and path.samefile(out) for path in paths):
        raise UserError(f"{out}: is one of the inputs; name another file")
    parts = out.with_name(f".{out.name}.parts")
    with opened(paths, manifest.image_shape) as sources, _locked(parts):
        _begin(parts, manifest, sources)
        schema = _schema(manifest, version)
        files, num_new = _predict_parts(parts, sources, model, schema)
        num_images, num_faults = _join(files, out, schema)
        shutil.rmtree(parts)
    rate = f"; {num_new / (time.perf_counter() - started):,.0f} images/s" if num_new else ""
    faults = f", {num_faults:,} of them without an answer (column error)" if num_faults else ""
    stdout_console().print(f"{out}: {num_images:,} images{faults}{rate}", soft_wrap=True)
    return num_faults


@contextlib.contextmanager
def _locked(parts: Path) -> Iterator[None]:
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


def _begin(parts: Path, manifest: Manifest, sources: Sequence[Source]) -> None:
    """Note what the parts are made from, or check that those which are there were made from the same."""
    identities = "\n".join(source.identity for source in sources)
    about = {
        "model": manifest.digest,
        "images": hashlib.sha256(identities.encode()).hexdigest(),
        "sizes": [BATCH_SIZE, PART_SIZE],
    }
    path = parts / "about.json"
    if not path.exists() and not any(parts.glob("*.arrow")):  # nothing yet, or a run that was killed at once
        write_json(path, about)
        return
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = {}
    if found != about:
        what = {"model": "another model", "images": "other images"}
        which = [name for key, name in what.items() if found.get(key) != about[key]] or ["another version"]
        raise UserError(f"{parts}: was begun with {' and '.join(which)}; remove it to begin anew")


def _predict_parts(
    parts: Path, sources: Sequence[Source], model: ExportedModel, schema: pa.Schema
) -> tuple[list[Path], int]:
    """Write the parts that are missing; return all of them, in order, and the number of images that were missing."""
    files, num_new = list[Path](), 0
    with progress_bar("predict", sum(source.num_images for source in sources), unit="steps") as bar:
        for source in sources:
            starts = range(0, source.num_images, PART_SIZE)
            own = [parts / f"{len(files) + number:06d}.arrow" for number in range(len(starts))]
            files += own
            finished = next((number for number, file in enumerate(own) if not file.exists()), len(own))
            bar.advance(min(finished * PART_SIZE, source.num_images))
            if finished == len(own):
                continue
            answers = _answers(source, finished * PART_SIZE, model)
            for file in own[finished:]:
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
    for batch in decoded(source.batches(start, BATCH_SIZE), manifest.image_shape, framing_of(manifest.dataset)):
        missing = BATCH_SIZE - len(batch.images)
        images = np.pad(batch.images, [(0, missing), (0, 0), (0, 0)]) if missing else batch.images
        started = batch, model.run(images)
        if running:
            yield _finished(*running)
        running = started
    if running:
        yield _finished(*running)


def _finished(batch: Decoded, answers: Array) -> tuple[Decoded, Probabilities]:
    """Return a batch with its probabilities; an image to which the model answers none has that as its error."""
    probabilities = np.asarray(answers)[: len(batch.images)]
    places = map(int, np.flatnonzero(~are_probabilities(probabilities)))
    return replace(batch, errors=dict.fromkeys(places, _NO_PROBABILITIES) | batch.errors), probabilities


def _schema(manifest: Manifest, version: str | None) -> pa.Schema:
    about = {
        "gradtrail.model": f"{manifest.name}{f' version {version}' if version else ''}",
        "gradtrail.model_digest": manifest.digest,
        "gradtrail.network": manifest.model,
        "gradtrail.dataset": manifest.dataset,
        "gradtrail.classes": json.dumps(manifest.classes),
    }
    kinds: Mapping[str, Any] = {
        "path": pa.string(),
        "index": pa.int64(),
        "label": pa.int32(),
        "class": pa.string(),
        "confidence": pa.float32(),
        "probabilities": pa.list_(pa.float32(), len(manifest.classes)),
        "error": pa.string(),
    }
    return pa.schema([*kinds.items()], metadata=about)


def _table(answers: Sequence[tuple[Decoded, Probabilities]], manifest: Manifest, schema: pa.Schema) -> pa.Table:
    """Return the rows of a part."""
    probabilities = np.concatenate([each for _, each in answers])
    count, first = len(probabilities), answers[0][0].batch
    errors = np.full(count, None, object)
    start = 0
    for batch, found in answers:
        errors[[start + place for place in batch.errors]] = [*batch.errors.values()]
        start += len(found)
    is_fault = errors != None  # noqa: E711 (elementwise)
    labels = probabilities.argmax(axis=1).astype(np.int32)
    flat = np.where(is_fault[:, None], np.float32(np.nan), probabilities).ravel()
    if first.first is None:
        paths, index = (
            pa.array([path for batch, _ in answers for path in batch.batch.paths]),
            pa.nulls(count, pa.int64()),
        )
    else:
        paths, index = pa.repeat(first.paths[0], count), pa.array(np.arange(first.first, first.first + count))
    columns = [
        paths,
        index,
        pa.array(labels, mask=is_fault),
        pa.array(manifest.classes).take(pa.array(labels, mask=is_fault)),
        pa.array(probabilities.max(axis=1), mask=is_fault),
        pa.FixedSizeListArray.from_arrays(flat, len(manifest.classes)),  # parquet of Arrow loses those that are null
        pa.array(errors, pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _join(files: Sequence[Path], out: Path, schema: pa.Schema) -> tuple[int, int]:
    """Join parts into one file, a row group each; return the numbers of images and of images without an answer."""
    num_images = num_faults = 0
    texts = ["path", "class", "error"]  # floats hardly repeat: a dictionary of them would only take time
    with atomic_file(out) as temporary, pq.ParquetWriter(temporary, schema, use_dictionary=texts) as writer:
        for file in files:
            try:
                table = pa.ipc.open_file(file).read_all()
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"{file}: damaged: {one_line(error)[:200]}; remove it and try again") from None
            num_images += len(table)
            num_faults += len(table) - table["error"].null_count
            writer.write_table(table, row_group_size=PART_SIZE)
    return num_images, num_faults
