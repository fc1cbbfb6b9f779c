"""Downloads that broke: they go on where they broke, and only with bytes that fit."""

import gzip
import re
from pathlib import Path

import pytest
from downloading import CONTENT, HALF, PACKED, Client
from mirrors import Handler, MirrorServer, Route


def breaking(*, supports_range: bool = True, breaks: int = 1, content_range: str | None = None) -> Route:
    """Send half of what is left and break, `breaks` times; then send all that is asked for."""
    breaks_left = [breaks]

    def answer(handler: Handler) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers["Range"] or "")
        start = int(asked[1]) if asked and supports_range else 0
        if start >= len(PACKED):
            handler.head(416, Content_Length=0)
            return
        rest = PACKED[start:]
        headers = {"Content_Range": content_range or f"bytes {start}-{len(PACKED) - 1}/{len(PACKED)}"} if start else {}
        handler.head(206 if start else 200, Content_Length=len(rest), **headers)
        breaks_left[0] -= 1
        handler.wfile.write(rest[: len(rest) // 2] if breaks_left[0] >= 0 else rest)

    return answer


def test_a_broken_download_resumes_where_it_broke(server: MirrorServer, tmp_path: Path) -> None:
    server.routes["breaking"] = breaking(breaks=2)
    Client(tmp_path, server.base("breaking")).assert_delivered_by(server.base("breaking"))
    quarter = HALF + (len(PACKED) - HALF) // 2
    assert [asked for _, asked in server.asked] == [None, f"bytes={HALF}-", f"bytes={quarter}-"]


def test_a_broken_download_starts_over_where_the_server_knows_no_ranges(server: MirrorServer, tmp_path: Path) -> None:
    server.routes["breaking"] = breaking(supports_range=False)
    Client(tmp_path, server.base("breaking")).assert_delivered_by(server.base("breaking"))
    assert [asked for _, asked in server.asked] == [None, f"bytes={HALF}-"]


def test_the_next_process_resumes_where_the_last_one_gave_up(server: MirrorServer, tmp_path: Path) -> None:
    server.routes["breaking"] = breaking(breaks=3)
    client = Client(tmp_path, server.base("breaking"))
    assert "the connection broke" in client.refusal()
    assert len(server.asked) == 3
    kept = client.part(server.base("breaking")).read_bytes()
    assert PACKED.startswith(kept)
    assert len(kept) > HALF
    Client(tmp_path, server.base("breaking")).assert_delivered_by(server.base("breaking"))
    assert server.asked[-1] == ("/breaking/images.gz", f"bytes={len(kept)}-")


@pytest.mark.parametrize("content_range", ["bytes 0-9/10", "bytes 1-9/10", "pages 7-9/10", "bytes */10"])
def test_a_range_that_was_not_asked_for_is_not_appended(
    server: MirrorServer, tmp_path: Path, content_range: str
) -> None:
    server.routes["breaking"] = breaking(content_range=content_range)
    Client(tmp_path, server.base("breaking")).assert_delivered_by(server.base("breaking"))
    assert [asked for _, asked in server.asked] == [None, f"bytes={HALF}-", None]


STALE = {
    "no gzip": b"?" * 1000,
    "other content": gzip.compress(CONTENT[::-1], mtime=0)[:1000],
    "complete": PACKED,
    "longer": PACKED + b"x",
}


@pytest.mark.parametrize("name", STALE)
def test_a_part_that_does_not_fit_is_discarded(server: MirrorServer, tmp_path: Path, name: str) -> None:
    server.routes["ranges"] = breaking(breaks=0)
    client = Client(tmp_path, server.base("ranges"))
    client.parts.mkdir()
    client.part(server.base("ranges")).write_bytes(STALE[name])
    client.assert_delivered_by(server.base("ranges"))
    assert [asked for _, asked in server.asked] == [f"bytes={len(STALE[name])}-", None]
    assert client.reports == []


def test_a_part_of_one_mirror_is_not_resumed_at_another(server: MirrorServer, tmp_path: Path) -> None:
    """They may have compressed the same file differently."""
    server.routes["breaking"] = breaking(breaks=3)
    Client(tmp_path, server.base("breaking"), server.base("good")).assert_delivered_by(server.base("good"))
    assert server.asked[-1] == ("/good/images.gz", None)
