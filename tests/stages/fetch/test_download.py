"""Downloads from a server that misbehaves: each test ends with the right bytes, or with the reason in one line.

After a failure there is nothing at `to`.
"""

import gzip
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import cases
from downloading import CONTENT, FILE, HALF, PACKED, Client
from mirrors import Handler, MirrorServer, Route, endless, status, whole

from gradtrail.stages.fetch import download
from gradtrail.stages.fetch.download import WrongBytesError, read_chunks, write_verified
from gradtrail.support.errors import UserError


def stalling(body: bytes, then: bytes = b"", go_on: threading.Event | None = None) -> Route:
    def answer(handler: Handler) -> None:
        handler.head(200, Content_Length=len(PACKED))
        handler.wfile.write(body)
        (go_on or handler.server.closing).wait(60)
        handler.wfile.write(then)

    return answer


def raw(head: bytes, forever: bytes = b"") -> Route:
    """Send bytes that need not be HTTP, then others without end."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(head)
        while forever and not handler.server.closing.is_set():
            handler.wfile.write(forever)

    return answer


def never_answering(handler: Handler) -> None:
    handler.server.closing.wait(60)


def dripping_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Drip: ")
    while not handler.server.closing.wait(0.05):
        handler.wfile.write(b".")


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


def test_a_good_mirror_delivers_and_the_next_is_not_asked(server: MirrorServer, tmp_path: Path) -> None:
    client = Client(tmp_path, server.base("good"), server.base("other"))
    client.assert_delivered_by(server.base("good"))
    assert client.reports == []
    assert server.asked == [("/good/images.gz", None)]


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
def test_a_faulty_mirror_is_reported_and_the_next_one_asked(server: MirrorServer, tmp_path: Path, name: str) -> None:
    route, reason = FAULTS[name]
    faulty, good = server.base("faulty"), server.base("good", "localhost")  # a silent host is not asked again
    server.routes["faulty"] = route
    client = Client(tmp_path, faulty)
    assert reason in client.refusal()
    assert list(client.parts.glob("*")) == []
    client = Client(tmp_path, faulty, good)
    client.assert_delivered_by(good)
    [report] = client.reports
    assert report.startswith(f"{faulty}/images.gz: ")
    assert reason in report


def test_a_redirect_is_followed(server: MirrorServer, tmp_path: Path) -> None:
    server.routes["moved"] = status(302, Location="/good/images.gz")
    Client(tmp_path, server.base("moved")).assert_delivered_by(server.base("moved"))


def test_what_a_server_labels_as_an_encoding_is_taken_as_it_comes(server: MirrorServer, tmp_path: Path) -> None:
    server.routes["labelled"] = whole(PACKED, Content_Encoding="gzip")
    Client(tmp_path, server.base("labelled")).assert_delivered_by(server.base("labelled"))


def test_a_bomb_fills_no_memory(tmp_path: Path) -> None:
    packer = zlib.compressobj(1, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(20)) + packer.flush()
    (tmp_path / "bomb").write_bytes(bomb)
    tracemalloc.start()
    try:
        assert sum(map(len, read_chunks(tmp_path / "bomb", gzipped=True))) == 20 << 20
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20


# Hosts that do not answer.


def test_a_connection_closed_without_an_answer_is_tried_again(server: MirrorServer, tmp_path: Path) -> None:
    server.routes["mute"] = lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)
    assert "without response" in Client(tmp_path, server.base("mute")).refusal()
    assert len(server.asked) == 3


def test_a_refused_connection_is_not_tried_again(tmp_path: Path, server: MirrorServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    client = Client(tmp_path, f"http://127.0.0.1:{port}/mnist")
    assert client.refusal().endswith("images.gz: Connection refused")
    assert client.refusal().endswith("images.gz: not asked again: Connection refused")


def test_a_slow_name_server_does_not_hold_up(
    server: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "STALL_SECONDS", 0.1)

    def resolve(*_: object, **__: object) -> None:
        server.closing.wait(60)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert "no answer within 0.1 s" in Client(tmp_path, "http://nowhere.invalid/mnist").refusal()


SLOW: dict[str, tuple[Route, str]] = {
    "stall": (stalling(PACKED[:HALF]), "the connection stalled"),
    "no answer": (never_answering, "no answer within 1 s"),
    "interim answers": (raw(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100), "no answer within 1 s"),
    "dripping headers": (dripping_headers, "no answer within 1 s"),
    "dripping body": (endless(lambda: iter(lambda: b"n", b""), pause_seconds=0.02), "not complete within the time"),
}


@pytest.mark.parametrize("name", cases(SLOW, fast=("dripping headers",)))
def test_a_slow_mirror_is_given_up_and_not_asked_again(
    server: MirrorServer, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "STALL_SECONDS", 1.0)
    server.routes["slow"], reason = SLOW[name]
    good = server.base("good", "localhost")
    client = Client(tmp_path, server.base("slow"), good, timeout_seconds=2.0 if name == "dripping body" else 60)
    client.assert_delivered_by(good)
    client.assert_delivered_by(good)
    assert [reason in report for report in client.reports] == [True, True]
    assert ["not asked again" in report for report in client.reports] == [False, True]


@pytest.mark.slow
def test_a_download_given_up_keeps_its_part_and_writes_no_more(
    server: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    server.routes["stall"] = stalling(PACKED[:HALF], PACKED[HALF:], go_on)
    client = Client(tmp_path, server.base("stall"), timeout_seconds=2.0)
    others = set(threading.enumerate())
    client.refusal()
    [worker] = [one for one in set(threading.enumerate()) - others if one.name == "download"]
    go_on.set()
    worker.join(10)
    assert client.part(server.base("stall")).read_bytes() == PACKED[:HALF]


def test_a_404_does_not_make_a_host_silent(server: MirrorServer, tmp_path: Path) -> None:
    client = Client(tmp_path, server.base("gone"))
    client.refusal()
    client.refusal()
    assert len(server.asked) == 2


def test_a_proxy_of_the_environment_is_used(
    server: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.routes["http:"] = whole(PACKED)  # a proxy is asked for the whole URL
    monkeypatch.setenv("http_proxy", server.base())
    Client(tmp_path, "http://mirror.invalid/mnist").assert_delivered_by("http://mirror.invalid/mnist")
    assert server.asked == [("http://mirror.invalid/mnist/images.gz", None)]


@pytest.mark.parametrize(
    "base",
    [
        *("ftp://127.0.0.1/mnist", "file:///etc", "/data/mnist", "http://", "http://host:port/", "http://host/a b", ""),
        *("http://host/\nb", "http://user:secret@host/", "http://host/?name="),
    ],
)
def test_only_http_urls_are_accepted(tmp_path: Path, base: str) -> None:
    with pytest.raises(UserError, match="only http:// and https:// URLs") as caught:
        Client(tmp_path, base)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_no_fault_of_the_mirror(
    server: MirrorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "write_verified", full)
    client = Client(tmp_path, server.base("good"))
    with pytest.raises(OSError, match="No space left"):
        client.mirrors.download(FILE, client.to)


def test_an_old_file_stays_until_the_new_one_is_verified(tmp_path: Path) -> None:
    to = tmp_path / "images"
    to.write_bytes(b"old")
    with pytest.raises(WrongBytesError):
        write_verified(FILE, [CONTENT[:-1], b"?"], to)
    assert to.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [to]
