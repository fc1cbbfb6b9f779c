"""Downloads from a server that misbehaves: each test ends with the right bytes, or with the reason in one line.

After a failure there is nothing at `to`.
"""

import gzip
import hashlib
import io
import socket
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from mirrors import Handler, MirrorServer, Route, endless, mirror_server, status, whole
from untrusted import damaged, fuzz

from gradtrail.stages.fetch import download
from gradtrail.stages.fetch.download import KnownFile, SourceError, chunks, require_url, write_verified
from gradtrail.support.errors import NoSourceError, UserError

CONTENT = b"".join(hashlib.sha256(bytes([seed])).digest() * 2 for seed in range(256)) * 16  # 256 KiB, hard to compress
PACKED = gzip.compress(CONTENT, mtime=0)
FILE = KnownFile(name="images", max_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


class Client:
    """Downloads `FILE` from mirrors to a folder; `reports` lists what was reported."""

    def __init__(self, folder: Path, *bases: str, timeout_seconds: float = 10.0) -> None:
        self.to, self.bases, self.timeout_seconds = folder / "raw" / FILE.name, bases, timeout_seconds
        self.reports: list[str] = []

    def download(self) -> str:
        return download.download(
            FILE, self.bases, self.to, timeout_seconds=self.timeout_seconds, report=self.reports.append
        )

    def assert_delivered_by(self, base: str) -> None:
        assert self.download() == base
        assert self.to.read_bytes() == CONTENT
        assert list(self.to.parent.iterdir()) == [self.to]

    def refusal(self) -> str:
        """Return the last reason reported of a download that fails."""
        with pytest.raises(NoSourceError, match=r"mirrors: none delivered images\.gz"):
            self.download()
        assert list(self.to.parent.glob("*")) == []
        assert not any("\n" in report for report in self.reports)
        return self.reports[-1]


@pytest.fixture(autouse=True)
def good_mirror(server: MirrorServer) -> None:
    server.routes["good"] = whole(PACKED)


def stalling(handler: Handler) -> None:
    handler.head(200, Content_Length=len(PACKED))
    handler.wfile.write(PACKED[: len(PACKED) // 2])
    handler.server.closing.wait(60)


def breaking(handler: Handler) -> None:
    handler.head(200, Content_Length=len(PACKED))
    handler.wfile.write(PACKED[: len(PACKED) // 2])


def test_progress_ends_at_the_length_that_the_server_states(
    server: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[float] = []
    progress_bar = download.progress_bar

    def recording(description: str, total: float, **options: Any) -> Any:
        totals.append(total)
        return progress_bar(description, total, **options)

    monkeypatch.setattr(download, "progress_bar", recording)
    client = Client(tmp_path, server.base("good"))
    client.assert_delivered_by(server.base("good"))
    assert totals == [len(PACKED)]


def raw(head: bytes, forever: bytes = b"") -> Route:
    """Send bytes that need not be HTTP, then others without end."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(head)
        while forever and not handler.server.closing.is_set():
            handler.wfile.write(forever)

    return answer


def never_answering(handler: Handler) -> None:
    handler.server.closing.wait(60)


def gzip_of_many_zeros() -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=31)
    blocks = [packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)]
    yield blocks[0]
    while True:
        yield blocks[1] * 100


def gzip_of_nothing() -> Iterator[bytes]:
    """Yield a gzip header, then empty stored blocks: input without end that never unpacks to a byte."""
    yield bytes.fromhex("1f8b08000000000000ff")
    while True:
        yield bytes.fromhex("000000ffff") * 20_000


def letters() -> Iterator[bytes]:
    while True:
        yield b"la" * 10_000


def test_next_mirror_is_not_requested_after_success(server: MirrorServer, tmp_path: Path) -> None:
    client = Client(tmp_path, server.base("good"), server.base("other"))
    client.assert_delivered_by(server.base("good"))
    assert client.reports == []
    assert server.requests == ["/good/images.gz"]


OK = b"HTTP/1.1 200 OK\r\n"
FAULTS: dict[str, tuple[Route, str]] = {
    "no HTTP": (raw(b"\0\xff garbage\r\n\r\n"), "BadStatusLine"),
    "endless header": (raw(OK + b"X: ", b"x" * 10_000), "LineTooLong"),
    "endless headers": (raw(OK, b"X: y\r\n" * 100), "more than 100 headers"),
    "two lengths": (raw(OK + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n" + PACKED), "multiple unmatching values"),
    "404": (status(404), "HTTP status 404"),
    "204": (status(204), "HTTP status 204"),
    "206 unasked": (status(206, Content_Range="bytes 5-9/10"), "HTTP status 206"),
    "503 without end": (endless(letters, 503), "HTTP status 503"),
    "html": (whole(b"<!DOCTYPE html><title>Welcome to the hotel's network</title>"), "no valid gzip"),
    "empty": (whole(b""), "SHA-256 of its 0 bytes is "),
    "broken connection": (breaking, "more expected"),
    "truncated gzip": (whole(PACKED[:-5]), "no valid gzip file (Compressed file ended"),
    "damaged gzip": (whole(PACKED[:-6] + b"??" + PACKED[-4:]), "no valid gzip file (CRC check failed"),
    "wrong bytes": (whole(gzip.compress(CONTENT[::-1])), "SHA-256 of its 262144 bytes is "),
    "too short": (whole(gzip.compress(CONTENT[:-1])), f"of {len(CONTENT)} bytes"),
    "too long": (whole(gzip.compress(CONTENT + b"x")), f"more than {len(CONTENT)} bytes"),
    "trailing bytes": (whole(PACKED + b"x"), "no valid gzip"),
    "gzip bomb": (endless(gzip_of_many_zeros), "compressed bytes"),
    "endless nothing": (endless(gzip_of_nothing), "compressed bytes"),
    "endless text": (endless(letters), "compressed bytes"),
    "redirect loop": (endless(letters, 302), "HTTP status 302"),
    "redirect to a file": (status(302, Location="file:///etc/hostname"), "No connection adapters"),
    "redirect to nothing": (status(302, Location="http://[/"), "IPv6"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_mirror_is_reported_and_next_mirror_delivers(server: MirrorServer, tmp_path: Path, name: str) -> None:
    server.routes["faulty"], reason = FAULTS[name]
    faulty, good = server.base("faulty"), server.base("good")
    assert reason in Client(tmp_path, faulty).refusal()
    client = Client(tmp_path, faulty, good)
    client.assert_delivered_by(good)
    [report] = client.reports
    assert report.startswith(f"{faulty}/images.gz: ")
    assert reason in report


def test_redirect_is_followed(server: MirrorServer, tmp_path: Path) -> None:
    server.routes["moved"] = status(302, Location="/good/images.gz")
    Client(tmp_path, server.base("moved")).assert_delivered_by(server.base("moved"))


def test_gzip_declared_as_content_encoding_is_not_decoded_twice(server: MirrorServer, tmp_path: Path) -> None:
    server.routes["labelled"] = whole(PACKED, Content_Encoding="gzip")
    Client(tmp_path, server.base("labelled")).assert_delivered_by(server.base("labelled"))


def test_gzip_bomb_fills_no_memory() -> None:
    packer = zlib.compressobj(1, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(20)) + packer.flush()
    tracemalloc.start()
    try:
        assert sum(map(len, chunks(io.BytesIO(bomb), gzipped=True))) == 20 << 20
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20


@fuzz(100)
@given(data=damaged(PACKED[:2000]))
def test_damaged_gzip_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SourceError):
        write_verified(FILE, chunks(io.BytesIO(data), gzipped=True), tmp_path / "to")
    assert list(tmp_path.iterdir()) == []


SLOW: dict[str, tuple[Route, str]] = {
    "stall": (stalling, "timed out"),
    "no answer": (never_answering, "timed out"),
    "dripping body": (endless(lambda: iter(lambda: b"n", b""), pause_seconds=0.02), "not complete within the time"),
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_mirror_is_given_up(
    server: MirrorServer, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "STALL_SECONDS", 0.5)
    server.routes["slow"], reason = SLOW[name]
    client = Client(tmp_path, server.base("slow"), server.base("good"), timeout_seconds=0.5)
    client.assert_delivered_by(server.base("good"))
    [report] = client.reports
    assert reason in report


def test_refused_connection_is_reported(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        client = Client(tmp_path, f"http://127.0.0.1:{bound.getsockname()[1]}/mnist")
        assert client.refusal().endswith("images.gz: Connection refused")


def test_proxy_of_environment_is_used(server: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.routes["http:"] = whole(PACKED)  # a proxy is asked for the whole URL
    monkeypatch.setenv("http_proxy", server.base())
    Client(tmp_path, "http://mirror.invalid/mnist").assert_delivered_by("http://mirror.invalid/mnist")
    assert server.requests == ["http://mirror.invalid/mnist/images.gz"]


@pytest.mark.parametrize(
    "base",
    [
        *("ftp://127.0.0.1/mnist", "/data/mnist", "http://", "http://host:port/", "http://host/\nb", ""),
        *("http://user:secret@host/", "http://host/?name="),
    ],
)
def test_only_http_urls_are_accepted(base: str) -> None:
    with pytest.raises(UserError, match="only http:// and https:// URLs") as caught:
        require_url(base)
    assert "\n" not in str(caught.value)


def test_full_disk_is_not_reported_as_fault_of_mirror(
    server: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "write_verified", full)
    with pytest.raises(OSError, match="No space left"):
        Client(tmp_path, server.base("good")).download()


def test_old_file_stays_until_new_one_is_verified(tmp_path: Path) -> None:
    to = tmp_path / "images"
    to.write_bytes(b"old")
    with pytest.raises(SourceError):
        write_verified(FILE, [CONTENT[:-1], b"?"], to)
    assert to.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [to]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MirrorServer]:
    """A server that is reached without a proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with mirror_server() as server:
        yield server
