"""Downloads from a real server on the loopback interface that misbehaves in every way a mirror may.

Each test ends with the right bytes or with the reason in words, and after a failure there is nothing at `to`.
"""

import contextlib
import gzip
import hashlib
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradtrail.stages.fetch import download
from gradtrail.stages.fetch.download import KnownFile, Mirrors, WrongBytesError, gunzip, write_verified
from gradtrail.support.errors import NoSourceError, UserError

CONTENT = b"".join(hashlib.sha256(bytes([seed])).digest() * 2 for seed in range(256)) * 16  # 256 KiB, hard to compress
PACKED = gzip.compress(CONTENT, mtime=0)
HALF = len(PACKED) // 2
FILE = KnownFile(name="images", num_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())

Route = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each request as the server's route for its path says, and notes the path and the Range header."""

    server: "Server"

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Range"]))
        with contextlib.suppress(ConnectionError):  # the client gives up in some tests, as it should
            self.server.routes.get(self.path.strip("/").split("/")[0], status(404))(self)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        """Be silent."""

    def head(self, code: int, **headers: object) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()


class Server(http.server.ThreadingHTTPServer):
    """A mirror with a base URL for each of its routes; `asked` lists the requests."""

    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.routes: dict[str, Route] = {"good": whole(PACKED)}
        self.asked: list[tuple[str, str | None]] = []
        self.closing = threading.Event()

    def base(self, route: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}/{route}"


def status(code: int, **headers: object) -> Route:
    return lambda handler: handler.head(code, Content_Length=0, **headers)


def whole(body: bytes) -> Route:
    def answer(handler: Handler) -> None:
        handler.head(200, Content_Length=len(body))
        handler.wfile.write(body)

    return answer


def breaking(*, supports_range: bool, breaks: int = 1, range_header: str | None = None) -> Route:
    """Send half of what is left and break, `breaks` times; then send all that is asked for."""
    breaks_left = [breaks]

    def answer(handler: Handler) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers["Range"] or "")
        start = int(asked[1]) if asked and supports_range else 0
        rest = PACKED[start:]
        if asked and supports_range:
            content_range = range_header or f"bytes {start}-{len(PACKED) - 1}/{len(PACKED)}"
            handler.head(206, Content_Length=len(rest), Content_Range=content_range)
        else:
            handler.head(200, Content_Length=len(rest))
        breaks_left[0] -= 1
        handler.wfile.write(rest[: len(rest) // 2] if breaks_left[0] >= 0 else rest)

    return answer


def endless(pieces: Callable[[], Iterator[bytes]], *, pause_seconds: float = 0.0) -> Route:
    """Send a body without length that never ends by itself."""

    def answer(handler: Handler) -> None:
        handler.head(200)
        for piece in pieces():
            handler.wfile.write(piece)
            if handler.server.closing.wait(pause_seconds):
                return

    return answer


def stalling(body: bytes) -> Route:
    def answer(handler: Handler) -> None:
        handler.head(200, Content_Length=len(PACKED))
        handler.wfile.write(body)
        handler.server.closing.wait(60)

    return answer


def never_answering(handler: Handler) -> None:
    handler.server.closing.wait(60)


def dripping_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Drip: ")
    while not handler.server.closing.wait(0.05):
        handler.wfile.write(b".")


def gzip_of_many_zeros() -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=31)
    while True:
        yield packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)


def gzip_of_nothing() -> Iterator[bytes]:
    """Yield a gzip header, then empty stored blocks: input without end that never unpacks to a byte."""
    yield bytes.fromhex("1f8b08000000000000ff")
    while True:
        yield bytes.fromhex("000000ffff") * 20_000


def gzip_with_long_name() -> Iterator[bytes]:
    yield bytes.fromhex("1f8b08080000000000ff")
    while True:
        yield b"n"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class Client:
    """Mirrors with their folders under `folder`; `reports` lists what was reported."""

    def __init__(self, folder: Path, *bases: str, timeout_seconds: float = 10.0) -> None:
        self.to = folder / "raw" / FILE.name
        self.parts = folder / "parts"
        self.reports: list[str] = []
        self.mirrors = Mirrors(bases, parts=self.parts, timeout_seconds=timeout_seconds, report=self.reports.append)

    def assert_delivered_by(self, base: str) -> None:
        assert self.mirrors.download(FILE, self.to) == f"{base}/images.gz"
        assert self.to.read_bytes() == CONTENT
        assert list(self.to.parent.iterdir()) == [self.to]
        assert list(self.parts.glob("*")) == []

    def refusal(self) -> str:
        with pytest.raises(NoSourceError) as caught:
            self.mirrors.download(FILE, self.to)
        assert "\n" not in str(caught.value)
        assert list(self.to.parent.glob("*")) == []
        return str(caught.value)

    def part(self, base: str) -> Path:
        return self.parts / f".images.{hashlib.sha256(f'{base}/images.gz'.encode()).hexdigest()[:8]}.part"


def closed_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_a_good_mirror_delivers_and_the_next_is_not_asked(server: Server, tmp_path: Path) -> None:
    client = Client(tmp_path, server.base("good") + "/", server.base("other"))
    client.assert_delivered_by(server.base("good"))
    assert client.reports == []
    assert server.asked == [("/good/images.gz", None)]


FAULTS: dict[str, tuple[Route, str]] = {
    "404": (status(404), "HTTP status 404"),
    "500": (status(500), "HTTP status 500"),
    "204": (status(204), "HTTP status 204"),
    "206 unasked": (status(206, Content_Range="bytes 5-9/10"), "HTTP status 206"),
    "html": (whole(b"<!DOCTYPE html><title>Welcome to the hotel's network</title>"), "no valid gzip"),
    "empty": (whole(b""), "the gzip stream is truncated"),
    "truncated gzip": (whole(PACKED[:-5]), "the gzip stream is truncated"),
    "damaged gzip": (whole(PACKED[:-6] + b"??" + PACKED[-4:]), "no valid gzip (incorrect data check)"),
    "wrong bytes": (whole(gzip.compress(CONTENT[::-1])), "sha256 is "),
    "too short": (whole(gzip.compress(CONTENT[:-1])), f"{len(CONTENT) - 1} bytes instead of {len(CONTENT)}"),
    "too long": (whole(gzip.compress(CONTENT + b"x")), f"more than the {len(CONTENT)} bytes"),
    "trailing bytes": (whole(PACKED + b"x"), "other bytes follow the gzip stream"),
    "second member": (whole(PACKED + PACKED), "other bytes follow the gzip stream"),
    "gzip bomb": (endless(gzip_of_many_zeros), f"more than the {len(CONTENT)} bytes"),
    "endless nothing": (endless(gzip_of_nothing), "compressed bytes"),
    "endless text": (endless(lambda: iter(lambda: b"la", b"")), "no valid gzip (incorrect header check)"),
    "redirect loop": (status(302, Location="/redirect%20loop/images.gz"), "HTTP status 302"),
    "redirect to a file": (status(302, Location="file:///etc/hostname"), "HTTP status 302"),
    "redirect to ftp": (status(302, Location="ftp://127.0.0.1/images.gz"), "unknown url type: ftp"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_mirror_is_reported_and_the_next_one_asked(server: Server, tmp_path: Path, name: str) -> None:
    route, reason = FAULTS[name]
    faulty = name.replace(" ", "%20")
    server.routes[faulty] = route
    client = Client(tmp_path, server.base(faulty))
    assert reason in client.refusal()
    assert list(client.parts.glob("*")) == []

    # By another name, since a silent host is not asked again.
    client = Client(tmp_path, server.base(faulty), server.base("good", "localhost"))
    client.assert_delivered_by(server.base("good", "localhost"))
    [report] = client.reports
    assert report.startswith(f"{server.base(faulty)}/images.gz: ")
    assert reason in report


def test_a_long_gzip_header_is_cut_off() -> None:
    with pytest.raises(WrongBytesError, match="compressed bytes"):
        list(gunzip(gzip_with_long_name(), KnownFile(name="images", num_bytes=10, sha256="")))


def test_a_redirect_is_followed(server: Server, tmp_path: Path) -> None:
    server.routes["moved"] = status(302, Location="/good/images.gz")
    Client(tmp_path, server.base("moved")).assert_delivered_by(server.base("moved"))


def test_a_bomb_fills_no_memory() -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    file = KnownFile(name="images", num_bytes=1 << 30, sha256="")
    tracemalloc.start()
    try:
        assert sum(map(len, gunzip([bomb], file))) == 64 << 20
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_every_reason_stands_in_the_last_message(server: Server, tmp_path: Path) -> None:
    server.routes["short"] = whole(PACKED[:-5])
    client = Client(tmp_path, server.base("gone"), server.base("short"))
    assert client.refusal() == (
        f"images: no mirror delivered it ({server.base('gone')}/images.gz: HTTP status 404; "
        f"{server.base('short')}/images.gz: the gzip stream is truncated)"
    )
    assert "none is given" in Client(tmp_path).refusal()


def test_a_broken_download_goes_on_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.routes["breaking"] = breaking(supports_range=True, breaks=2)
    Client(tmp_path, server.base("breaking")).assert_delivered_by(server.base("breaking"))
    quarter = HALF + (len(PACKED) - HALF) // 2
    assert [asked for _, asked in server.asked] == [None, f"bytes={HALF}-", f"bytes={quarter}-"]


def test_a_broken_download_starts_over_where_the_server_knows_no_ranges(server: Server, tmp_path: Path) -> None:
    server.routes["breaking"] = breaking(supports_range=False)
    Client(tmp_path, server.base("breaking")).assert_delivered_by(server.base("breaking"))
    assert [asked for _, asked in server.asked] == [None, f"bytes={HALF}-"]


def test_a_connection_that_breaks_thrice_is_given_up_and_its_part_kept(server: Server, tmp_path: Path) -> None:
    server.routes["breaking"] = breaking(supports_range=True, breaks=3)
    client = Client(tmp_path, server.base("breaking"))
    assert "the connection broke" in client.refusal()
    assert len(server.asked) == 3
    kept = client.part(server.base("breaking")).read_bytes()
    assert PACKED.startswith(kept)
    assert len(kept) > HALF
    Client(tmp_path, server.base("breaking")).assert_delivered_by(server.base("breaking"))
    assert server.asked[-1] == ("/breaking/images.gz", f"bytes={len(kept)}-")


def test_a_part_that_starts_over_holds_nothing_of_before(server: Server, tmp_path: Path) -> None:
    server.routes["breaking"] = breaking(supports_range=False, breaks=3)
    client = Client(tmp_path, server.base("breaking"))
    client.refusal()
    assert client.part(server.base("breaking")).read_bytes() == PACKED[:HALF]


def test_a_connection_closed_without_an_answer_is_tried_again(server: Server, tmp_path: Path) -> None:
    server.routes["mute"] = lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)
    assert "broke before an answer" in Client(tmp_path, server.base("mute")).refusal()
    assert len(server.asked) == 3


@pytest.mark.parametrize("content_range", ["bytes 0-9/10", "bytes 1-9/10", "pages 7-9/10", "bytes */10"])
def test_a_range_that_was_not_asked_for_is_not_appended(server: Server, tmp_path: Path, content_range: str) -> None:
    server.routes["breaking"] = breaking(supports_range=True, range_header=content_range)
    client = Client(tmp_path, server.base("breaking"))
    client.assert_delivered_by(server.base("breaking"))
    assert [asked for _, asked in server.asked] == [None, f"bytes={HALF}-", None]


@pytest.mark.parametrize("kept", [PACKED[:1000], PACKED[:-1]], ids=["some", "all but one"])
def test_a_part_of_an_earlier_process_is_continued(server: Server, tmp_path: Path, kept: bytes) -> None:
    server.routes["ranges"] = breaking(supports_range=True, breaks=0)
    client = Client(tmp_path, server.base("ranges"))
    client.parts.mkdir()
    client.part(server.base("ranges")).write_bytes(kept)
    client.assert_delivered_by(server.base("ranges"))
    assert server.asked == [("/ranges/images.gz", f"bytes={len(kept)}-")]


STALE = {
    "no gzip": b"?" * 1000,
    "other content": gzip.compress(CONTENT[::-1], mtime=0)[:1000],
    "complete": PACKED,
    "longer": PACKED + b"x",
}


@pytest.mark.parametrize("name", STALE)
def test_a_part_that_does_not_fit_is_discarded(server: Server, tmp_path: Path, name: str) -> None:
    def answer(handler: Handler) -> None:
        start = int((handler.headers["Range"] or "bytes=0-")[6:-1])
        (status(416) if start >= len(PACKED) else breaking(supports_range=True, breaks=0))(handler)

    server.routes["ranges"] = answer
    client = Client(tmp_path, server.base("ranges"))
    client.parts.mkdir()
    client.part(server.base("ranges")).write_bytes(STALE[name])
    client.assert_delivered_by(server.base("ranges"))
    assert [asked for _, asked in server.asked] == [f"bytes={len(STALE[name])}-", None]
    assert client.reports == []


def test_a_part_of_one_mirror_is_not_continued_at_another(server: Server, tmp_path: Path) -> None:
    """They may have compressed the same file differently."""
    server.routes["breaking"] = breaking(supports_range=True, breaks=3)
    Client(tmp_path, server.base("breaking"), server.base("good")).assert_delivered_by(server.base("good"))
    assert server.asked[-1] == ("/good/images.gz", None)


KILLED = """
import sys
from pathlib import Path
from gradtrail.stages.fetch.download import KnownFile, Mirrors
base, folder, num_bytes, sha256 = sys.argv[1:]
mirrors = Mirrors([base], parts=Path(folder) / "parts", timeout_seconds=60, report=print)
mirrors.download(KnownFile(name="images", num_bytes=int(num_bytes), sha256=sha256), Path(folder) / "raw" / "images")
"""


def test_a_killed_process_leaves_a_part_to_continue(server: Server, tmp_path: Path) -> None:
    server.routes["once"] = stalling(PACKED[:HALF])
    client = Client(tmp_path, server.base("once"))
    arguments = [server.base("once"), str(tmp_path), str(FILE.num_bytes), FILE.sha256]
    environment = os.environ | {"PYTHONPATH": str(Path(download.__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", KILLED, *arguments], env=environment) as process:
        part = client.part(server.base("once"))
        give_up = time.monotonic() + 30
        while not (part.exists() and part.stat().st_size) and time.monotonic() < give_up:
            time.sleep(0.01)
        process.kill()
    kept = part.read_bytes()
    assert kept
    assert PACKED.startswith(kept)
    assert not client.to.exists()
    server.routes["once"] = breaking(supports_range=True, breaks=0)
    client.mirrors.download(FILE, client.to)
    assert client.to.read_bytes() == CONTENT
    assert server.asked[-1] == ("/once/images.gz", f"bytes={len(kept)}-")


def test_a_refused_connection_is_not_tried_again(tmp_path: Path) -> None:
    client = Client(tmp_path, f"http://127.0.0.1:{closed_port()}/mnist")
    assert "Connection refused" in client.refusal()
    assert "not asked again: Connection refused" in client.refusal()


def test_a_name_that_does_not_resolve_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert "Name or service not known" in Client(tmp_path, "http://nowhere.invalid/mnist").refusal()


def test_a_slow_name_server_does_not_hold_up(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: server.closing.wait(60))
    assert "no connection within 0.1 s" in Client(tmp_path, "http://nowhere.invalid/mnist").refusal()


SLOW: dict[str, tuple[Route, str]] = {
    "stall": (stalling(PACKED[:HALF]), "the connection stalled"),
    "no answer": (never_answering, "no answer within"),
    "dripping headers": (dripping_headers, "no answer within"),
    "dripping body": (endless(gzip_with_long_name, pause_seconds=0.02), "not complete within the time allowed"),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_mirror_is_given_up_and_not_asked_again(server: Server, tmp_path: Path, name: str) -> None:
    route, reason = SLOW[name]
    slow = name.replace(" ", "-")
    server.routes[slow] = route
    good = server.base("good", "localhost")
    client = Client(tmp_path, server.base(slow), good, timeout_seconds=0.3)
    client.assert_delivered_by(good)
    client.assert_delivered_by(good)
    assert [reason in report for report in client.reports] == [True, True]
    assert ["not asked again" in report for report in client.reports] == [False, True]
    assert [path for path, _ in server.asked].count(f"/{slow}/images.gz") == 1


def test_a_stalled_download_keeps_its_part(server: Server, tmp_path: Path) -> None:
    server.routes["stall"] = stalling(PACKED[:HALF])
    client = Client(tmp_path, server.base("stall"), timeout_seconds=0.3)
    client.refusal()
    assert client.part(server.base("stall")).read_bytes() == PACKED[:HALF]


def test_a_404_does_not_make_a_host_silent(server: Server, tmp_path: Path) -> None:
    client = Client(tmp_path, server.base("gone"))
    client.refusal()
    client.refusal()
    assert len(server.asked) == 2


def test_a_proxy_of_the_environment_is_used(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.routes["http:"] = whole(PACKED)  # a proxy is asked for the whole URL
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    Client(tmp_path, "http://mirror.invalid/mnist").assert_delivered_by("http://mirror.invalid/mnist")
    assert server.asked == [("http://mirror.invalid/mnist/images.gz", None)]


@pytest.mark.parametrize(
    "base",
    [
        "ftp://127.0.0.1/mnist",
        "file:///etc",
        "/data/mnist",
        "http://",
        "http://host:port/",
        "http://host/a b",
        "http://host/\nb",
        "http://user:secret@host/",
        "http://host/?name=",
        "",
    ],
)
def test_only_http_urls_are_accepted(tmp_path: Path, base: str) -> None:
    with pytest.raises(UserError, match="only http:// and https:// URLs") as caught:
        Client(tmp_path, base)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_no_fault_of_the_mirror(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "write_verified", full)
    client = Client(tmp_path, server.base("good"))
    with pytest.raises(OSError, match="No space left"):
        client.mirrors.download(FILE, client.to)


def test_an_old_file_stands_until_the_new_one_is_verified(tmp_path: Path) -> None:
    to = tmp_path / "images"
    to.write_bytes(b"old")
    with pytest.raises(WrongBytesError):
        write_verified(FILE, [CONTENT[:-1], b"?"], to)
    assert to.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [to]
