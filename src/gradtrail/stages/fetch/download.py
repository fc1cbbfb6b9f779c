"""Download a file of known bytes from the first of several mirrors that delivers it.

A mirror is untrusted: whatever it sends, a bounded number of bytes is received and unpacked, every wait ends, and the
file appears only when its SHA-256 is right. Out of scope: which mirrors there are, and what the bytes mean.
"""

import contextlib
import functools
import gzip
import hashlib
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Retry
from urllib3.exceptions import HTTPError

from gradtrail.stages.common.files import atomic_file, naming_file
from gradtrail.support.errors import NoSourceError, UserError, one_line
from gradtrail.support.progress import ProgressBar, progress_bar

CONNECT_SECONDS = 3.0  # for one of a host's addresses
STALL_SECONDS = 10.0
_CHUNK_BYTES = 64 * 1024
_SPARE_BYTES = 1024 * 1024  # gzip may make a file longer, and its header has room for a name and a comment
_RETRIES, _REDIRECTS = 2, 5


class SourceError(Exception):
    """A source does not deliver a file; the message is the reason, in one line."""


class SilentHostError(SourceError):
    """The host does not answer, or too slowly: its other files need not be tried."""


class BrokenConnectionError(SourceError):
    """The connection broke: the download can resume."""


class WrongBytesError(SourceError):
    """What came is not the file: nothing of it can be resumed."""


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A file whose content is known beforehand.

    Attributes:
        name: its name, without `.gz`.
        max_bytes: the most that is written of it: its length uncompressed, where that is known.
        sha256: of its uncompressed bytes, hexadecimal; None where any bytes will do.
    """

    name: str
    max_bytes: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class Mirrors:
    """Several base URLs that serve the same files as `<base>/<name>.gz`; a host once silent is not asked again.

    Attributes:
        bases: http or https URLs, in the order in which they are tried; UserError where one is none. Proxies of the
            environment are used.
        parts: folder that keeps what an interrupted download received, one hidden `.part` file for each URL, from which
            the next process resumes. Made when needed.
        timeout_seconds: the longest that one file may take from one mirror; one that is silent for 10 s is given up.
        report: takes one line for each mirror that fails.
    """

    bases: Sequence[str]
    parts: Path
    timeout_seconds: float
    report: Callable[[str], None]
    _silent: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for base in self.bases:
            _check_base(base)

    def download(self, file: KnownFile, to: Path) -> str:
        """Fetch a file from the first mirror that delivers the right bytes, and unpack it.

        Args:
            file: what the bytes must be; no more than `max_bytes` + 1 MiB are received.
            to: where the file appears, complete and verified, or not at all.

        Returns:
            The base URL that delivered it.

        Raises:
            NoSourceError: no mirror delivered it; the reason of each has been reported.
        """
        for base in self.bases:
            url = f"{base.rstrip('/')}/{file.name}.gz"
            try:
                self._download_from(url, file, to)
            except SourceError as fault:
                self.report(f"{url}: {fault}")
            else:
                for part in self.parts.glob(f".{file.name}.*.part"):
                    part.unlink(missing_ok=True)
                return base
        raise NoSourceError(f"mirrors: none delivered {file.name}.gz")

    def _download_from(self, url: str, file: KnownFile, to: Path) -> None:
        """Download from one mirror: resume after a broken connection, start over where the rest does not fit."""
        host = urlsplit(url).netloc
        if host in self._silent:
            raise SilentHostError(f"not asked again: {self._silent[host]}")
        # Each URL has its own part: two mirrors may have compressed the same file differently.
        part = self.parts / f".{file.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part"
        deadline = time.monotonic() + self.timeout_seconds
        for tries_left in reversed(range(1 + _RETRIES)):
            resumed = _size(part) > 0
            try:
                with progress_bar(file.name, file.max_bytes, unit="bytes") as bar:
                    _supervise(functools.partial(_receive, url, file, part, bar), deadline)
                write_verified(file, read_chunks(part, gzipped=True), to)
                return
            except SilentHostError as fault:
                self._silent[host] = str(fault)
                raise
            except BrokenConnectionError:
                if not tries_left:
                    raise
            except WrongBytesError:
                part.unlink(missing_ok=True)
                if not (tries_left and resumed):
                    raise


def check_reachable(url: str) -> None:
    """Raise `SourceError` unless an http or https URL answers within 10 s with status 200."""
    _supervise(lambda _: _open(url).close(), time.monotonic() + STALL_SECONDS)


def write_verified(file: KnownFile, chunks: Iterable[bytes], to: Path) -> None:
    """Write `chunks` to a file that appears only if they are the bytes of `file`; raise WrongBytesError otherwise."""
    digest, num_bytes = hashlib.sha256(), 0
    with atomic_file(to) as beside, beside.open("wb") as out:
        for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > file.max_bytes:
                raise WrongBytesError(f"more than {file.max_bytes} bytes")
            digest.update(chunk)
            out.write(chunk)
        if file.sha256 and file.sha256 != digest.hexdigest():
            found = f"SHA-256 of its {num_bytes} bytes is {digest.hexdigest()[:16]}..."
            raise WrongBytesError(f"{found}, expected {file.sha256[:16]}... of {file.max_bytes} bytes")


def read_chunks(path: Path, *, gzipped: bool) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked where it is `gzipped`, in pieces of at most 64 KiB: a bomb fills no memory.

    Raises:
        WrongBytesError: no gzip file, damaged, or truncated.
    """
    try:
        with gzip.open(path) if gzipped else path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as fault:
        raise WrongBytesError(f"no valid gzip file ({one_line(fault)[:100]})") from fault


def _check_base(base: str) -> None:
    """Raise `UserError` unless `base` is an http or https URL with a host."""
    try:
        split = urlsplit(base)
        valid = split.scheme in ("http", "https") and split.hostname and split.port != 0 and split.username is None
    except ValueError:  # a port or an address that is none
        valid = False
    if not valid or re.search(r"[^!-~]|[?#]", base):
        raise UserError(f"mirror {base!r}: only http:// and https:// URLs of a folder are allowed, without a user name")


def _supervise(work: Callable[[Callable[[], None]], None], deadline: float) -> None:
    """Run `work` in a thread; give it up at the deadline (by `time.monotonic`), or once nothing has come for 10 s.

    A time-out of a socket is not enough: neither a slow name server nor a header that comes byte by byte meets it.
    `work` is called with a function that it must call whenever something has come, and which ends it once given up.
    """
    done, given_up, beats = Future[None](), threading.Event(), [time.monotonic()]

    def beat() -> None:
        if given_up.is_set():
            raise SilentHostError("given up")
        beats[1:] = [time.monotonic()]

    def run() -> None:
        try:
            work(beat)
            done.set_result(None)
        except BaseException as fault:
            done.set_exception(fault)

    threading.Thread(target=run, name="download", daemon=True).start()
    try:
        while (seconds := min(deadline, beats[-1] + STALL_SECONDS) - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                return done.result(seconds)
    finally:
        given_up.set()
    if time.monotonic() >= deadline:
        raise SilentHostError("not complete within the time allowed")
    raise SilentHostError("the connection stalled" if len(beats) > 1 else f"no answer within {STALL_SECONDS:g} s")


def _receive(url: str, file: KnownFile, part: Path, bar: ProgressBar, beat: Callable[[], None]) -> None:
    """Receive the compressed file into `part`: all of it, or the rest where the server sends only that."""
    max_bytes = file.max_bytes + _SPARE_BYTES
    with _open(url, _size(part)) as response:
        beat()
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if response.status_code == requests.codes.partial_content else "wb", buffering=0) as kept:
            total_bytes = kept.tell() + (response.raw.length_remaining or max_bytes)
            while chunk := _read(response):
                beat()
                with naming_file(part):
                    kept.write(chunk)
                if kept.tell() > max_bytes:
                    raise WrongBytesError(f"more than {max_bytes} compressed bytes")
                bar.update(file.max_bytes * kept.tell() / total_bytes)


def _read(response: requests.Response) -> bytes:
    """Return the next bytes of a body, as many as one receive brings; none at its end."""
    try:
        return response.raw.read1(_CHUNK_BYTES, decode_content=False)  # a server may label a `.gz` as an encoding
    except HTTPError as fault:
        raise BrokenConnectionError(f"the connection broke ({one_line(fault)[:100]})") from fault


class _Session(requests.Session):
    """A session that leaves redirects to its caller: Requests would read the whole body of one, however long."""

    def get_redirect_target(self, resp: requests.Response) -> None:  # noqa: ARG002
        return None


def _open(url: str, start: int = 0) -> requests.Response:
    """Request the bytes of `url` from `start` on; return a response of status 200 (all) or 206 (the rest)."""
    headers = {"User-Agent": "gradtrail", "Accept-Encoding": "identity"} | (
        {"Range": f"bytes={start}-"} if start else {}
    )
    # No status is tried again: urllib3 would read the whole body first.
    adapter = HTTPAdapter(max_retries=Retry(_RETRIES, connect=0, status=0, backoff_factor=0.1))
    timeout = (CONNECT_SECONDS, 2 * STALL_SECONDS)  # whoever supervises gives up before; this ends the thread
    with _Session() as session:
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        get = functools.partial(session.get, headers=headers, stream=True, timeout=timeout)
        try:
            response = get(url)
            for _ in range(_REDIRECTS):
                if not response.is_redirect:
                    break
                response.close()
                response = get(urljoin(response.url, response.headers["Location"]))
        except (requests.RequestException, HTTPError, ValueError) as fault:  # the last: of an address that is none
            raise SilentHostError(_innermost(fault)) from fault
    with contextlib.ExitStack() as stack:
        stack.enter_context(response)
        _check_answer(response, start)
        stack.pop_all()
    return response


def _check_answer(response: requests.Response, start: int) -> None:
    """Raise unless the body is the whole file, or what was asked for: the bytes from `start` on."""
    status, content_range = response.status_code, response.headers.get("Content-Range", "")
    if start and status == requests.codes.requested_range_not_satisfiable:
        raise WrongBytesError("the server has no bytes after those received before")
    if status != requests.codes.ok and not (start and status == requests.codes.partial_content):
        raise SourceError(f"HTTP status {status}")
    if status != requests.codes.ok and not re.match(rf"bytes {start}-\d+/", content_range):
        raise WrongBytesError(f"asked for the bytes from {start}, got Content-Range {content_range[:60]!r}")


def _innermost(fault: BaseException) -> str:
    """Return, as one line, what was raised first: what wraps it names only the libraries around it."""
    while inner := fault.__cause__ or fault.__context__:
        fault = inner
    text = fault.strerror if isinstance(fault, OSError) and fault.strerror else fault
    return one_line(text)[:200] or type(fault).__name__


def _size(path: Path) -> int:
    """Return a file's length in bytes, 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0
