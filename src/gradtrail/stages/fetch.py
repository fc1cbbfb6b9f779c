"""Acquire a data set: from an installed package, or from the first of a folder, mirrors and OpenML that has all files.

A file of a mirror is written only if its SHA-256 is that of the catalog.
"""

import gzip
import hashlib
import os
import socket
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import requests
from urllib3.exceptions import HTTPError

from gradtrail.core.config import config
from gradtrail.stages import image_files
from gradtrail.stages.common.environment import RuntimeConfig
from gradtrail.stages.common.files import LFS_POINTER, is_lfs_pointer, write_json
from gradtrail.stages.data import data_files
from gradtrail.stages.data.data_files import RAW_FILES, DatasetInfo, RawArrays, describe_raw, encode_idx, read_raw
from gradtrail.stages.datasets import DATASETS, Dataset
from gradtrail.support.errors import NO_SOURCE_FLAG, NoSourceError, UserError, one_line, printable
from gradtrail.support.progress import progress_bar

STALL_SECONDS = 10.0  # longest wait for the next bytes
_CONNECT_SECONDS = 3.0  # limit for each address of a host
_CHUNK_BYTES = 64 * 1024


class SourceError(Exception):
    """A source does not deliver a file; the message is the reason, in one line."""


@config
class FetchConfig:
    """The section `fetch` of `params.yaml`."""

    dataset: str  # a key of the catalog; one data set never replaces another by itself
    pictures: image_files.PicturesConfig  # how the image files of `folder` and `csv` are read

    def check(self) -> None:
        if self.dataset not in DATASETS:
            raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {self.dataset!r}")


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A file whose content is known beforehand."""

    name: str  # without `.gz`
    sha256: str | None  # hexadecimal, of the uncompressed bytes; None if any bytes will do
    is_packed: bool = False  # True if `sha256` is that of the compressed file, `<name>.gz`

    def write(self, data: bytes, folder: Path, *, gzipped: bool) -> None:
        """Write the file to a folder, uncompressed; raise SourceError unless these are its bytes."""
        try:
            content = gzip.decompress(data) if gzipped else data
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise SourceError(f"no valid gzip file ({one_line(error)[:100]})") from error
        checked = data if self.is_packed else content
        if self.sha256 and self.sha256 != (actual := hashlib.sha256(checked).hexdigest()):
            raise SourceError(
                f"SHA-256 of its {len(checked)} bytes is {actual[:16]}..., expected {self.sha256[:16]}..."
            )
        (folder / self.name).write_bytes(content)


def known_files(entry: Dataset) -> list[KnownFile]:
    """Return the files of a data set, four or an archive, with their digests if they are known."""
    names = (entry.archive,) if entry.archive else RAW_FILES
    digests = entry.packed_sha256 or entry.sha256 or [None] * len(names)
    pairs = zip(names, digests, strict=True)
    return [KnownFile(name=name, sha256=sha256, is_packed=bool(entry.packed_sha256)) for name, sha256 in pairs]


def acquire(fetch: FetchConfig, to: Path, runtime: RuntimeConfig) -> DatasetInfo:
    """Write the four IDX files of the data set to an empty folder; report each source that fails in a line on stderr.

    Raises:
        NoSourceError: no source has all four files; the message says what to do.
        UserError: the user's own files are missing, damaged, or do not fit together.
    """
    entry = DATASETS[fetch.dataset]
    if entry.load:
        _write_arrays(entry, entry.load(), to)
        return describe_raw(to, fetch.dataset, entry.class_names)
    if fetch.dataset in image_files.SOURCES and (source := os.environ.get(entry.folder_variable)):
        return _from_images(fetch, Path(source), to)

    sources = _sources(entry, to, runtime)
    for deliver in sources.values():
        try:
            origin = deliver()
            if entry.read_archive:
                _unpack(entry.read_archive, to / entry.archive)
            info = describe_raw(to, fetch.dataset, entry.class_names)
        except NoSourceError:
            continue  # the reason was reported
        except UserError as error:
            if fetch.dataset == "idx":  # no other source
                folder = os.environ[entry.folder_variable]
                raise UserError(str(error).replace(str(to), f"{entry.folder_variable}: {folder}")) from error
            image_files.report(str(error))
        else:
            _report_own(entry, to)
            image_files.report(f"{entry.title} from {origin}" + (f"; cite {entry.citation}" if entry.citation else ""))
            return info

    flag = os.environ.get(NO_SOURCE_FLAG)
    if flag and entry.stand_in:  # DVC does not pass a stage's exit status on to `gradtrail repro`
        Path(flag).touch()
    advice = f"set {entry.folder_variable} to {entry.folder_content}"
    advice += f", or set fetch.dataset: {entry.stand_in} in params.yaml" if entry.stand_in else ""
    outcome = f"answered (tried: {', '.join(sources)})" if sources else f"to ask, as {entry.folder_variable} is not set"
    raise NoSourceError(f"no source of {entry.title} {outcome}: {advice}")


def _sources(entry: Dataset, to: Path, runtime: RuntimeConfig) -> dict[str, Callable[[], str]]:
    """Return the sources by name, in order; each writes the files to `to` and returns their origin."""
    sources: dict[str, Callable[[], str]] = {}
    if folder := os.environ.get(entry.folder_variable):
        sources[entry.folder_variable] = lambda: _from_folder(entry, Path(folder), to)
    mirrors = runtime.mirrors if entry.mirrors and runtime.mirrors is not None else entry.mirrors
    if mirrors:
        seconds = runtime.download_timeout_seconds
        origins = (download(file, mirrors, to, timeout_seconds=seconds) for file in known_files(entry))
        sources["mirrors"] = lambda: ", ".join(dict.fromkeys(origins))
    if entry.openml and runtime.openml:
        sources["OpenML"] = lambda: _from_openml(entry, to)
    return sources


def _from_folder(entry: Dataset, folder: Path, to: Path) -> str:
    """Copy the files from a folder, each plain or gzipped; raise UserError, which names the file that is not right."""
    for file in known_files(entry):
        plain, gzipped = folder / file.name, folder / f"{file.name}.gz"
        path = plain if plain.is_file() and not file.is_packed else gzipped
        if not path.is_file():
            missing = f"is no {gzipped.name}" if file.is_packed else f"is neither {plain.name} nor {gzipped.name}"
            raise UserError(f"{entry.folder_variable}: {folder}: there {missing}")
        if is_lfs_pointer(path):
            raise UserError(f"{entry.folder_variable}: {path}: {LFS_POINTER}")
        try:
            file.write(path.read_bytes(), to, gzipped=path == gzipped)
        except SourceError as error:
            raise UserError(f"{entry.folder_variable}: {path}: {error}") from error
    return str(folder)


def _report_own(entry: Dataset, folder: Path) -> None:
    """Print the sizes of the classes of IDX files that a person made, and what is conspicuous about the images."""
    if any(file.sha256 for file in known_files(entry)):
        return
    images, labels, test_images, test_labels = arrays = read_raw(folder)
    labels = np.concatenate([labels, test_labels])
    image_files.report(image_files.describe_classes(labels, [*map(str, range(labels.max() + 1))]))
    names = [*(f"train {row}" for row in range(len(images))), *(f"test {row}" for row in range(len(test_images)))]
    image_files.warn_of_repeated_and_blank(arrays, names)


def download(file: KnownFile, mirrors: Sequence[str], to: Path, *, timeout_seconds: float) -> str:
    """Download a file to a folder from the first mirror that delivers the right bytes; return the mirror.

    The timeout is the limit for one mirror; proxies of the environment are used. Raises NoSourceError if no mirror
    delivers the file; each reason was reported.
    """
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{file.name}.gz"
        try:
            file.write(_receive(url, file.name, time.monotonic() + timeout_seconds), to, gzipped=True)
        except (SourceError, requests.RequestException, HTTPError) as error:
            image_files.report(f"{url}: {_reason(error)}")
        else:
            return mirror
    raise NoSourceError(f"mirrors: none delivered {file.name}.gz")


def _receive(url: str, name: str, deadline: float) -> bytes:
    """Return the body at a URL, as it is sent; raise SourceError if there is none or it comes too slowly."""
    body, headers = bytearray(), {"User-Agent": "gradtrail", "Accept-Encoding": "identity"}
    with requests.get(url, headers=headers, stream=True, timeout=(_CONNECT_SECONDS, STALL_SECONDS)) as response:
        if response.status_code != requests.codes.ok:
            raise SourceError(f"HTTP status {response.status_code}")
        with progress_bar(name, int(response.headers.get("Content-Length", 0)), unit="bytes") as bar:
            # At most what one receive brings, so that slow bytes cannot exceed the deadline. A server may declare
            # `.gz` as an encoding: not decoded
            while chunk := response.raw.read1(_CHUNK_BYTES, decode_content=False):
                body += chunk
                if time.monotonic() > deadline:
                    raise SourceError("not complete within the time allowed")
                bar.advance(len(chunk))
    return bytes(body)


def _from_openml(entry: Dataset, to: Path) -> str:
    """Fetch the data set from OpenML through scikit-learn; raise NoSourceError, whose reason was reported."""
    from sklearn.datasets import fetch_openml  # late: the import takes half a second

    default_timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)  # scikit-learn sets none
    try:
        with (
            tempfile.TemporaryDirectory(prefix="gradtrail-") as cache,  # ARFF and JSON, gzipped; it is read twice
            warnings.catch_warnings(action="ignore"),  # its retry: our report has the outcome
        ):
            bunch = fetch_openml(
                entry.openml,
                version=1,
                as_frame=False,
                data_home=cache,
                n_retries=1,
                delay=0.5,
                parser="pandas",  # the other one needs minutes
                # Left to itself, scikit-learn 1.9 fails on the numbers that pandas 3.1 makes of the label's categories
                read_csv_kwargs={"dtype": np.uint8},
            )
        images, labels = np.asarray(bunch.data).reshape(-1, *entry.image_shape), np.asarray(bunch.target)
        count = entry.num_train
        _write_arrays(entry, (images[:count], labels[:count], images[count:], labels[count:]), to)
    except Exception as error:  # the parsers of scikit-learn may raise any exception
        image_files.report(f"OpenML: {_reason(error)}")
        raise NoSourceError("OpenML does not deliver it") from error
    finally:
        socket.setdefaulttimeout(default_timeout)
    return f"OpenML {entry.openml}, version 1"


def _from_images(fetch: FetchConfig, source: Path, to: Path) -> DatasetInfo:
    """Convert the image files of a folder or a CSV file; raise UserError, which names what is not right."""
    entry = DATASETS[fetch.dataset]
    try:
        listed = image_files.SOURCES[fetch.dataset](source)
        arrays, names = image_files.read_images(listed, fetch.pictures)
        write_json(to / data_files.FILES, image_files.file_table(source, listed, fetch.pictures))
    except UserError as error:
        raise UserError(f"{entry.folder_variable}: {printable(one_line(error))}") from None
    _write_arrays(entry, arrays, to)
    count = len(arrays[0]) + len(arrays[2])
    others = sum(path.is_file() for path in source.rglob("*")) - count  # none of a CSV file
    passed_over = f"; hidden files and other types passed over: {others:,}" if others > 0 else ""
    image_files.report(f"{entry.title}: {count:,} images from {source}{passed_over}")
    return describe_raw(to, fetch.dataset, names)


def _unpack(read: Callable[[Path], RawArrays], path: Path) -> None:
    """Replace the archive, whose digest was verified, by the four IDX files."""
    for name, array in zip(RAW_FILES, read(path), strict=True):
        (path.parent / name).write_bytes(encode_idx(array))
    path.unlink()


def _write_arrays(entry: Dataset, arrays: RawArrays, to: Path) -> None:
    for file, array in zip(known_files(entry), arrays, strict=True):
        file.write(encode_idx(array), to, gzipped=False)


def _reason(error: BaseException) -> str:
    """Return the message of a fault as one line; of the network's faults, that of the innermost."""
    while not isinstance(error, SourceError) and (cause := error.__cause__ or error.__context__):
        error = cause
    message = str(error) if isinstance(error, SourceError | TimeoutError) else f"{type(error).__name__}: {error}"
    return printable(one_line(getattr(error, "strerror", None) or message)[:200])
