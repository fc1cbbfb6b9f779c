"""Where the data sets come from: a folder, mirrors, OpenML, or the digits that scikit-learn ships.

Every source of MNIST ends in the same four IDX files, and their sha256 is compared wherever they came from; the digits
are written in the same form under the same names. Out of scope: which data set is wanted, and falling back to digits.
"""

import contextlib
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradtrail.stages.artifacts.idx import encode_idx
from gradtrail.stages.fetch.download import (
    STALL_SECONDS,
    KnownFile,
    Mirrors,
    SourceError,
    WrongBytesError,
    check_reachable,
    gunzip,
    read_chunks,
    write_verified,
)
from gradtrail.support.errors import NoSourceError, UserError, one_line

OPENML_URL = "https://www.openml.org"

Uint8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class IdxFile(KnownFile):
    """A known IDX file of uint8 and the shape that its header declares."""

    shape: tuple[int, ...]


MNIST_FILES = (
    IdxFile(
        name="train-images-idx3-ubyte",
        num_bytes=47_040_016,
        sha256="ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        shape=(60_000, 28, 28),
    ),
    IdxFile(
        name="train-labels-idx1-ubyte",
        num_bytes=60_008,
        sha256="65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        shape=(60_000,),
    ),
    IdxFile(
        name="t10k-images-idx3-ubyte",
        num_bytes=7_840_016,
        sha256="0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        shape=(10_000, 28, 28),
    ),
    IdxFile(
        name="t10k-labels-idx1-ubyte",
        num_bytes=10_008,
        sha256="ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        shape=(10_000,),
    ),
)


def acquire_mnist(
    to: Path,
    *,
    folder: Path | None,
    mirrors: Sequence[str],
    openml: bool,
    parts: Path,
    timeout_seconds: float,
    report: Callable[[str], None],
    show_progress: bool | None = None,
) -> str:
    """Write the four files of MNIST from the first source that has them: the folder, the mirrors, OpenML.

    Args:
        to: an empty folder; each file appears in it under its IDX name, uncompressed and verified. After a fault some
            may be there, so the caller should make the folder known only once this returns.
        folder: the folder that `MNIST_DIR` names, or None; a faulty one is reported and passed over.
        mirrors: base URLs that serve `<name>.gz`.
        openml: whether to ask OpenML at last.
        parts: folder for what came of broken downloads; it must outlive the process, and not be `to`.
        timeout_seconds: the longest that one file may take from one mirror.
        report: takes one line for each source that fails.
        show_progress: whether to show bars on stderr; None shows them when that is a terminal.

    Returns:
        Where the files came from, for a person to read.

    Raises:
        NoSourceError: no source has all four files; the message says what to do.
        UserError: a mirror is no http or https URL.
    """
    if folder is not None:
        with _reporting(report):
            return from_folder(folder, to)
    if mirrors:
        with contextlib.suppress(NoSourceError):  # each mirror's fault has been reported by then
            return from_mirrors(
                mirrors,
                to,
                parts=parts,
                timeout_seconds=timeout_seconds,
                report=report,
                show_progress=show_progress,
            )
    if openml:
        with _reporting(report):
            return from_openml(to)
    sources = {"MNIST_DIR": folder is not None, "mirrors": bool(mirrors), "OpenML": openml}
    asked = ", ".join(name for name, is_given in sources.items() if is_given) or "nobody"
    raise NoSourceError(
        f"no source of MNIST answered (asked: {asked}): set MNIST_DIR to a folder with the four IDX files, "
        "or set fetch.dataset: digits in params.yaml"
    )


def from_folder(folder: Path, to: Path) -> str:
    """Copy the four files of MNIST from a folder that holds each as IDX, `<name>`, or gzip, `<name>.gz`.

    Args:
        folder: the folder that `MNIST_DIR` names.
        to: folder that the files are written into, uncompressed and verified.

    Returns:
        Where the files came from, for a person to read.

    Raises:
        UserError: a file is missing, unreadable, damaged or another; the message names it and says why.
    """
    for file in MNIST_FILES:
        path = _find(folder, file)
        chunks = read_chunks(path)
        try:
            write_verified(file, gunzip(chunks, file) if path.suffix == ".gz" else chunks, to / file.name)
        except (OSError, WrongBytesError) as fault:
            reason = fault.strerror if isinstance(fault, OSError) else fault
            raise UserError(f"MNIST_DIR: {path}: {reason}") from fault
    return f"MNIST_DIR={folder}"


def from_mirrors(
    mirrors: Sequence[str],
    to: Path,
    *,
    parts: Path,
    timeout_seconds: float,
    report: Callable[[str], None],
    show_progress: bool | None = None,
) -> str:
    """Download the four files of MNIST, each from the first mirror that delivers it.

    Args:
        mirrors: base URLs that serve `<name>.gz`.
        to: folder that the files are written into, uncompressed and verified.
        parts: folder for what came of broken downloads, see `Mirrors`.
        timeout_seconds: the longest that one file may take from one mirror.
        report: takes one line for each mirror that fails.
        show_progress: whether to show bars on stderr; None shows them when that is a terminal.

    Returns:
        The mirrors that delivered, for a person to read.

    Raises:
        NoSourceError: no mirror delivered some file; the message gives each mirror's reason.
        UserError: a mirror is no http or https URL.
    """
    several = Mirrors(mirrors, parts=parts, timeout_seconds=timeout_seconds, report=report, show_progress=show_progress)
    urls = [several.download(file, to / file.name) for file in MNIST_FILES]
    return ", ".join(dict.fromkeys(url.rpartition("/")[0] for url in urls))


def from_openml(to: Path) -> str:
    """Fetch MNIST from OpenML through scikit-learn, and encode it as the four IDX files.

    OpenML holds the 60,000 training rows and the 10,000 test rows one after the other, in their original order.

    Args:
        to: folder that the files are written into, verified.

    Returns:
        Where the files came from, for a person to read.

    Raises:
        NoSourceError: OpenML does not answer, or what it sends is not MNIST.
    """
    num_train = MNIST_FILES[0].shape[0]
    try:
        check_reachable(OPENML_URL)
        images, labels = _fetch_openml()
        arrays = (images[:num_train], labels[:num_train], images[num_train:], labels[num_train:])
        for file, array in zip(MNIST_FILES, arrays, strict=True):
            write_verified(file, [encode_idx(array)], to / file.name)
    except Exception as fault:  # whatever OpenML answers, scikit-learn's parsers may raise anything
        reason = one_line(fault)
        kind = "" if isinstance(fault, SourceError) else f"{type(fault).__name__}: "
        raise NoSourceError(f"OpenML: {kind}{reason}") from fault
    return "OpenML mnist_784, version 1"


def digits(to: Path) -> str:
    """Write scikit-learn's 1,797 handwritten digits in the form of MNIST: four IDX files under the same names.

    Images are enlarged from 8 x 8 to 20 x 20 and centred in 28 x 28, as MNIST's are. Every 7th image of each class is a
    test image, and the order is kept. All arithmetic is on integers: every machine writes the same bytes.

    Args:
        to: folder that the files are written into.

    Returns:
        Where the files came from, for a person to read.
    """
    from sklearn.datasets import load_digits  # late: half a second that few need

    bunch = load_digits()
    images, labels = _enlarge(bunch.images.astype(np.int64)), bunch.target.astype(np.uint8)
    is_test = _every_seventh(labels)
    arrays = (images[~is_test], labels[~is_test], images[is_test], labels[is_test])
    for file, array in zip(MNIST_FILES, arrays, strict=True):
        (to / file.name).write_bytes(encode_idx(array))
    return "scikit-learn's digits (UCI, 1,797 images)"


@contextlib.contextmanager
def _reporting(report: Callable[[str], None]) -> Iterator[None]:
    """Report a source's fault instead of raising it."""
    try:
        yield
    except UserError as fault:
        report(str(fault))


def _find(folder: Path, file: KnownFile) -> Path:
    """Return the path of a file in `folder`: plain where there is one, else gzip."""
    for path in (folder / file.name, folder / f"{file.name}.gz"):
        if path.is_file():
            return path
    raise UserError(f"MNIST_DIR: {folder}: there is neither {file.name} nor {file.name}.gz")


def _fetch_openml() -> tuple[Uint8Array, Uint8Array]:
    """Return all images and labels; the values are the caller's to verify."""
    from sklearn.datasets import fetch_openml

    with contextlib.ExitStack() as stack:
        # The cache holds what OpenML sent, as it came (ARFF and JSON, gzipped; no pickle); it is read twice.
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradtrail-"))
        stack.enter_context(_socket_timeout(STALL_SECONDS))
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # its retries: our report says how it ended
        bunch = fetch_openml(
            "mnist_784",
            version=1,
            as_frame=False,
            data_home=cache,
            n_retries=1,
            delay=0.5,
            parser="pandas",  # the other one needs minutes
            # Left to itself, scikit-learn 1.9 fails on the numbers that pandas 3.1 makes of the label's categories.
            read_csv_kwargs={"dtype": np.uint8},
        )
    return bunch.data.reshape(-1, *MNIST_FILES[0].shape[1:]), bunch.target


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Give every new socket a time-out in seconds: scikit-learn sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _enlarge(images: npt.NDArray[np.int64]) -> Uint8Array:
    """Resize (batch, 8, 8) of 0..16 to 20 x 20 of 0..255, bilinear, and pad it to (batch, 28, 28)."""
    # Where the centres of 20 pixels lie among those of 8: steps of 0.4, so that every weight is a tenth.
    centres = (np.arange(20) + 0.5) * 8 / 20 - 0.5
    weights = np.stack([np.interp(centres, np.arange(8), unit) for unit in np.eye(8)], axis=1)
    tenths = np.rint(10 * weights).astype(np.int64)
    hundredths = tenths @ images @ tenths.T  # 0..1600
    scaled = (2 * 255 * hundredths + 1600) // (2 * 1600)  # rounded, halves up
    return np.pad(scaled.astype(np.uint8), ((0, 0), (4, 4), (4, 4)))


def _every_seventh(labels: Uint8Array) -> npt.NDArray[np.bool_]:
    """Mark the 7th, 14th, ... example of each class."""
    is_test = np.zeros(labels.shape, dtype=np.bool_)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[6::7]] = True
    return is_test
