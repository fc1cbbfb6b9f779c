"""Download a file of known bytes from the first of several mirrors that delivers it.

A mirror is untrusted: a bounded number of bytes is received and unpacked, and the file appears only if its SHA-256 is
right. Out of scope: which mirrors there are, and what the bytes mean.
"""

import contextlib
import gzip
import hashlib
import io
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urljoin, urlsplit

import requests
from urllib3.exceptions import HTTPError

from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import NoSourceError, UserError, one_line, printable
from gradtrail.support.progress import progress_bar

STALL_SECONDS = 10.0  # longest wait for the next bytes
_CONNECT_SECONDS = 3.0  # limit for each address of a host
_CHUNK_BYTES = 64 * 1024
_SPARE_BYTES = 1024 * 1024  # gzip may make a file longer, and its header has room for a name and a comment
_REDIRECTS = 5


class SourceError(Exception):
    """A source does not deliver a file; the message is the reason, in one line."""


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A file whose content is known beforehand."""

    name: str  # without `.gz`
    max_bytes: int  # uncompressed length, if it is known; no more is written
    sha256: str | None  # hexadecimal, of the uncompressed bytes; None if any bytes will do


def download(
    file: KnownFile, bases: Sequence[str], to: Path, *, timeout_seconds: float, report: Callable[[str], None]
) -> str:
    """Fetch a file from the first mirror that delivers the right bytes, and unpack it.

    Args:
        file: the expected bytes; no more than `max_bytes` + 1 MiB are received.
        bases: base URLs that serve the file as `<base>/<name>.gz`, in order. Proxies of the environment are used.
        to: path at which the file appears, complete and verified, or not at all.
        timeout_seconds: limit for the download from one mirror; one that sends nothing for 10 s is given up.
        report: function that is called with one line for each mirror that fails.

    Returns:
        The base URL that delivered the file.

    Raises:
        NoSourceError: no mirror delivered the file; each reason was reported.
    """
    for base in bases:
        url = f"{base.rstrip('/')}/{file.name}.gz"
        try:
            packed = io.BytesIO(_receive(url, file, time.monotonic() + timeout_seconds))
            write_verified(file, chunks(packed, gzipped=True), to)
        except SourceError as error:
            report(f"{url}: {error}")
        else:
            return base
    raise NoSourceError(f"mirrors: none delivered {file.name}.gz")


def require_url(base: str) -> None:
    """Raise `UserError` unless `base` is an http or https URL of a folder, without a user name."""
    try:
        split = urlsplit(base)
        valid = split.scheme in ("http", "https") and split.hostname and split.port != 0 and split.username is None
    except ValueError:  # an invalid port or address
        valid = False
    if not valid or re.search(r"[^!-~]|[?#]", base):
        raise UserError(f"mirror {base!r}: only http:// and https:// URLs of a folder are allowed, without a user name")


def check_reachable(url: str) -> None:
    """Raise `SourceError` unless an http or https URL answers with status 200."""
    _open(url).close()


def write_verified(file: KnownFile, parts: Iterable[bytes], to: Path) -> None:
    """Write `parts` to a file that appears only if they are the bytes of `file`; raise SourceError otherwise."""
    digest, num_bytes = hashlib.sha256(), 0
    with atomic_file(to) as temporary, temporary.open("wb") as stream:
        for part in parts:
            num_bytes += len(part)
            if num_bytes > file.max_bytes:
                raise SourceError(f"more than {file.max_bytes} bytes")
            digest.update(part)
            stream.write(part)
        if file.sha256 and file.sha256 != digest.hexdigest():
            actual = f"SHA-256 of its {num_bytes} bytes is {digest.hexdigest()[:16]}..."
            raise SourceError(f"{actual}, expected {file.sha256[:16]}... of {file.max_bytes} bytes")


def chunks(file: IO[bytes], *, gzipped: bool) -> Iterator[bytes]:
    """Yield the bytes of an open file, unpacked if `gzipped`, in pieces of at most 64 KiB.

    Raises:
        SourceError: the file is no gzip file, damaged, or truncated.
    """
    try:
        stream = gzip.GzipFile(fileobj=file) if gzipped else file
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SourceError(f"no valid gzip file ({one_line(error)[:100]})") from error


def _receive(url: str, file: KnownFile, deadline: float) -> bytes:
    """Return the body at a URL, the compressed file; raise SourceError if it is too long or comes too slowly."""
    max_bytes, body = file.max_bytes + _SPARE_BYTES, bytearray()
    with (
        _open(url) as response,
        _network_errors(),
        progress_bar(file.name, response.raw.length_remaining or max_bytes, unit="bytes") as bar,
    ):
        # At most what one receive brings, so that slow bytes cannot exceed the deadline. A server may declare `.gz` as
        # an encoding: not decoded.
        while chunk := response.raw.read1(_CHUNK_BYTES, decode_content=False):
            body += chunk
            if len(body) > max_bytes:
                raise SourceError(f"more than {max_bytes} compressed bytes")
            if time.monotonic() > deadline:
                raise SourceError("not complete within the time allowed")
            bar.advance(len(chunk))
    return bytes(body)


class _Session(requests.Session):
    """A session that leaves redirects to its caller: Requests would read the whole body of one, however long."""

    def get_redirect_target(self, resp: requests.Response) -> None:  # noqa: ARG002
        return None


def _open(url: str) -> requests.Response:
    """Request a URL; return a response with status 200, whose body is not read yet."""
    headers = {"User-Agent": "gradtrail", "Accept-Encoding": "identity"}
    with _Session() as session, _network_errors():
        for _ in range(1 + _REDIRECTS):
            response = session.get(url, headers=headers, stream=True, timeout=(_CONNECT_SECONDS, STALL_SECONDS))
            if not response.is_redirect:
                break
            response.close()
            url = urljoin(url, response.headers["Location"])
    if response.status_code != requests.codes.ok:
        response.close()
        raise SourceError(f"HTTP status {response.status_code}")
    return response


@contextlib.contextmanager
def _network_errors() -> Iterator[None]:
    """Turn what Requests and urllib3 raise into a SourceError, whose message is that of the innermost error."""
    try:
        yield
    except (requests.RequestException, HTTPError, ValueError) as error:  # the last: of an invalid address
        inner: BaseException = error
        while cause := inner.__cause__ or inner.__context__:
            inner = cause
        message = str(inner) if isinstance(inner, TimeoutError) else f"{type(inner).__name__}: {inner}"
        message = (isinstance(inner, OSError) and inner.strerror) or message
        raise SourceError(printable(one_line(message)[:200])) from error
