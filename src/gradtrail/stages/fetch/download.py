"""Fetch a file of known bytes from the first of several mirrors that delivers them.

A mirror is untrusted: whatever it sends, no more than the file's own bytes are unpacked, no wait is without end, and
the file appears only when its sha256 is right. A body flows through a chain of generators: connection, `.part` file,
gunzip, check. Out of scope: which mirrors there are, and what the bytes mean.
"""

import contextlib
import hashlib
import http.client
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import NoSourceError, UserError, one_line
from gradtrail.support.progress import ProgressBar, progress_bar

CONNECT_SECONDS = 3.0
STALL_SECONDS = 10.0
_CHUNK_BYTES = 64 * 1024
_SPARE_BYTES = 1024 * 1024  # gzip may make a file longer, and its header has room for a name and a comment
_RETRIES = 2
_PORTS = {"http": 80, "https": 443}

_T = TypeVar("_T")


class SourceError(Exception):
    """A source does not deliver a file; the message is the reason, in one line."""


class SilentHostError(SourceError):
    """The host does not answer, or too slowly: its other files need not be tried."""


class BrokenConnectionError(SourceError):
    """The connection broke: what has come so far may be continued."""


class WrongBytesError(SourceError):
    """What came is not the file: nothing of it may be continued."""


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A file whose bytes are known beforehand: its name, its length in bytes and the sha256 of its bytes in hex."""

    name: str
    num_bytes: int
    sha256: str


class Mirrors:
    """Several base URLs that serve the same files as `<base>/<name>.gz`; a host once silent is not asked again.

    Attributes:
        bases: the base URLs, in the order in which they are tried.
    """

    def __init__(
        self,
        bases: Sequence[str],
        *,
        parts: Path,
        timeout_seconds: float,
        report: Callable[[str], None],
        show_progress: bool | None = None,
    ) -> None:
        """Check the base URLs; nothing is asked of them yet.

        Args:
            bases: http or https URLs; http proxies of the environment are honoured.
            parts: folder that keeps what came of a broken download, one hidden `.part` file for each URL. It must
                outlive the process for the next one to go on from there. Made when needed.
            timeout_seconds: the longest that one file may take from one mirror, retries included. A mirror is given up
                sooner when it does not accept a connection within 3 s, or sends nothing for 10 s.
            report: takes one line for each mirror that fails.
            show_progress: whether to show a bar on stderr; None shows it when that is a terminal.

        Raises:
            UserError: a base is no http or https URL.
        """
        for base in bases:
            _check_base(base)
        self.bases = tuple(base.rstrip("/") for base in bases)
        self._parts = parts
        self._timeout_seconds = timeout_seconds
        self._report = report
        self._show_progress = show_progress
        self._silent: dict[str, str] = {}

    def download(self, file: KnownFile, to: Path) -> str:
        """Fetch `<base>/<name>.gz` from the first mirror that delivers the right bytes, and unpack it.

        A connection that breaks is tried twice more from where it broke, as is a `.part` that a killed process left.

        Args:
            file: what the bytes must be once unpacked. No more than `num_bytes` are written, and no more than
                `num_bytes` + 1 MiB are received.
            to: where the file appears, complete and verified, or not at all.

        Returns:
            The URL that delivered it.

        Raises:
            NoSourceError: no mirror delivered it; the message gives each mirror's reason, in one line.
        """
        reasons = []
        for base in self.bases:
            url = f"{base}/{file.name}.gz"
            try:
                self._download_from(url, file, to)
            except SourceError as fault:
                reasons.append(f"{url}: {fault}")
                self._report(reasons[-1])
            else:
                for part in self._parts.glob(f".{file.name}.*.part"):
                    part.unlink(missing_ok=True)
                return url
        raise NoSourceError(f"{file.name}: no mirror delivered it ({'; '.join(reasons) or 'none is given'})")

    def _download_from(self, url: str, file: KnownFile, to: Path) -> None:
        """Fetch from one mirror, unless its host is known to be silent."""
        host = urlsplit(url).netloc
        if host in self._silent:
            raise SilentHostError(f"not asked again: {self._silent[host]}")
        try:
            check_reachable(url)
            self._download_retrying(url, file, to)
        except SilentHostError as fault:
            self._silent[host] = str(fault)
            raise

    def _download_retrying(self, url: str, file: KnownFile, to: Path) -> None:
        """Go on after a broken connection; start over when what was kept turns out to be wrong."""
        # Each URL has its own part: two mirrors may have compressed the same file differently.
        part = self._parts / f".{file.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part"
        deadline = time.monotonic() + self._timeout_seconds
        for tries_left in reversed(range(1 + _RETRIES)):
            resumed = _size(part) > 0
            try:
                self._download_once(url, file, to, part, deadline)
            except BrokenConnectionError:
                if not tries_left:
                    raise
            except WrongBytesError:
                part.unlink(missing_ok=True)
                if not (tries_left and resumed):
                    raise
            else:
                return

    def _download_once(self, url: str, file: KnownFile, to: Path, part: Path, deadline: float) -> None:
        """Fetch the whole file, or the rest of it."""
        bar_of = progress_bar(file.name, file.num_bytes, unit="bytes", enabled=self._show_progress)
        # Closed at once, since a fault further down the chain must not leave the connection open.
        with bar_of as bar, contextlib.closing(_receive(url, part, deadline)) as compressed:
            write_verified(file, _count(gunzip(compressed, file), bar), to)


def check_reachable(url: str) -> None:
    """Try whether the host of `url` accepts a connection within 3 s in all.

    An HTTP library waits for so long on each of a host's addresses, and for a name server as long as the system likes:
    behind a firewall that adds up to minutes. Behind a proxy there is nothing to try, and nothing is.

    Args:
        url: http or https.

    Raises:
        SilentHostError: the name does not resolve, the connection is refused, or nobody answers.
    """
    split = urlsplit(url)
    host = split.hostname or ""
    if split.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return
    address = (host, split.port or _PORTS[split.scheme])
    try:
        _within(CONNECT_SECONDS, lambda: socket.create_connection(address, CONNECT_SECONDS).close())
    except TimeoutError as fault:
        raise SilentHostError(f"no connection within {CONNECT_SECONDS:g} s") from fault
    except OSError as fault:
        raise SilentHostError(_one_line(fault)) from fault


def gunzip(chunks: Iterable[bytes], file: KnownFile) -> Iterator[bytes]:
    """Unpack one gzip stream as it comes, in pieces of at most 64 KiB: a bomb fills no memory.

    Args:
        chunks: the compressed bytes, cut anywhere.
        file: what they should hold; more than `num_bytes` + 1 MiB of compressed bytes are refused.

    Yields:
        The bytes unpacked.

    Raises:
        WrongBytesError: not gzip, damaged, too long, truncated, or followed by other bytes.
    """
    inflater = zlib.decompressobj(wbits=31)  # gzip and nothing else
    max_bytes = file.num_bytes + _SPARE_BYTES
    num_bytes = 0
    for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise WrongBytesError(f"more than {max_bytes} compressed bytes")
        yield from _inflate(inflater, chunk)
    if not inflater.eof:
        raise WrongBytesError("the gzip stream is truncated")


def write_verified(file: KnownFile, chunks: Iterable[bytes], to: Path) -> None:
    """Write `chunks` to a file that appears only if they are the bytes of `file`.

    Args:
        file: what the bytes must be; no more than `num_bytes` of them are written.
        chunks: the bytes, cut anywhere.
        to: where the file appears.

    Raises:
        WrongBytesError: too many bytes, too few, or another sha256.
    """
    digest = hashlib.sha256()
    num_bytes = 0
    with atomic_file(to) as beside, beside.open("wb") as out:
        for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > file.num_bytes:
                raise WrongBytesError(f"more than the {file.num_bytes} bytes of the file")
            digest.update(chunk)
            out.write(chunk)
        if num_bytes < file.num_bytes:
            raise WrongBytesError(f"{num_bytes} bytes instead of {file.num_bytes}")
        if digest.hexdigest() != file.sha256:
            raise WrongBytesError(f"sha256 is {digest.hexdigest()[:16]}... instead of {file.sha256[:16]}...")


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes in chunks of 64 KiB."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _check_base(base: str) -> None:
    """Raise `UserError` unless `base` is an http or https URL with a host."""
    try:
        split = urlsplit(base)
        valid = split.scheme in _PORTS and bool(split.hostname) and split.port != 0 and split.username is None
    except ValueError:  # a port or an address that is none
        valid = False
    if not valid or re.search(r"[^!-~]|[?#]", base):
        raise UserError(f"mirror {base!r}: only http:// and https:// URLs of a folder are allowed, without a user name")


def _receive(url: str, part: Path, deadline: float) -> Generator[bytes, None, None]:
    """Yield the compressed bytes: those kept in `part`, where the server sends only the rest, then those that come."""
    start = _size(part)
    with _open(url, start, deadline) as response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        if resumed:
            yield from read_chunks(part)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if resumed else "wb") as kept:
            for chunk in _read_body(response, deadline):
                kept.write(chunk)
                yield chunk


def _open(url: str, start: int, deadline: float) -> http.client.HTTPResponse:
    """Ask for the bytes from `start` on; the answer's status is 200 for all of them, or 206 for those from `start`."""
    headers = {"User-Agent": "gradtrail"} | ({"Range": f"bytes={start}-"} if start else {})
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme was checked
    seconds = _wait_seconds(deadline)
    try:
        # In a thread, since headers that come byte by byte would outwit a socket's time-out.
        response = _within(seconds, lambda: _opener().open(request, timeout=seconds))
    except urllib.error.HTTPError as fault:
        fault.close()
        # 416: what was kept is no beginning of what the server has.
        raise (WrongBytesError if fault.code == 416 else SourceError)(f"HTTP status {fault.code}") from fault
    except TimeoutError as fault:
        raise SilentHostError(f"no answer within {seconds:.3g} s") from fault
    except urllib.error.URLError as fault:
        raise SilentHostError(_one_line(fault.reason)) from fault
    except (OSError, http.client.HTTPException) as fault:
        raise BrokenConnectionError(f"the connection broke before an answer ({_one_line(fault)})") from fault
    assert isinstance(response, http.client.HTTPResponse)  # noqa: S101 - for the type checker
    try:
        _check_answer(response, start)
    except SourceError:
        response.close()
        raise
    return response


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https alone: a redirect leads to neither ftp nor a local file."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _check_answer(response: http.client.HTTPResponse, start: int) -> None:
    """Raise unless the body is the whole file, or what was asked for: the bytes from `start` on."""
    content_range = response.headers.get("Content-Range", "")
    if response.status == http.client.OK:
        return
    if not start or response.status != http.client.PARTIAL_CONTENT:
        raise SourceError(f"HTTP status {response.status}")
    if not re.match(rf"bytes {start}-\d+/", content_range):
        raise WrongBytesError(f"asked for the bytes from {start}, got Content-Range {content_range[:60]!r}")


def _read_body(response: http.client.HTTPResponse, deadline: float) -> Iterator[bytes]:
    """Yield the body as it comes; raise when it stalls, breaks, or is not complete by the deadline."""
    while True:
        _wait_seconds(deadline)
        try:
            chunk = response.read1(_CHUNK_BYTES)  # one receive: `read` would wait for a full chunk without end
        except TimeoutError as fault:
            raise SilentHostError("the connection stalled") from fault
        except (OSError, http.client.HTTPException) as fault:
            raise BrokenConnectionError(f"the connection broke ({_one_line(fault)})") from fault
        if not chunk:
            break
        yield chunk
    if response.length:
        raise BrokenConnectionError(f"the connection broke, {response.length} bytes before the end")


def _inflate(inflater: "zlib._Decompress", chunk: bytes) -> Iterator[bytes]:
    """Yield what `chunk` unpacks to, in pieces of at most `_CHUNK_BYTES`."""
    while chunk and not inflater.eof:
        try:
            piece = inflater.decompress(chunk, _CHUNK_BYTES)
        except zlib.error as fault:
            raise WrongBytesError(f"no valid gzip ({str(fault).rpartition(': ')[2]})") from fault
        yield piece
        chunk = inflater.unconsumed_tail
    if inflater.unused_data or chunk:
        raise WrongBytesError("other bytes follow the gzip stream")


def _count(chunks: Iterable[bytes], bar: ProgressBar) -> Iterator[bytes]:
    """Pass `chunks` on, and show on `bar` how many bytes have passed."""
    for chunk in chunks:
        yield chunk
        bar.advance(len(chunk))


def _wait_seconds(deadline: float) -> float:
    """Return how long the next wait may be, in seconds; raise when the deadline has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise SilentHostError("not complete within the time allowed")
    return min(STALL_SECONDS, left)


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """Return what `call` returns, or raise TimeoutError; what comes too late is dropped."""
    future: Future[_T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as fault:
            future.set_exception(fault)

    threading.Thread(target=work, daemon=True).start()
    return future.result(timeout=seconds)


def _size(path: Path) -> int:
    """Return a file's length in bytes, 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0


def _one_line(fault: object) -> str:
    """Return the reason in a fault without its number, as one line."""
    text = fault.strerror if isinstance(fault, OSError) and fault.strerror else fault
    return one_line(text) or type(fault).__name__
