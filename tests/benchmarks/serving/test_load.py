"""The load of `benchmarks.serving` and its results."""

import asyncio
import itertools

import pytest

from benchmarks.serving.__main__ import Measured, ratio
from benchmarks.serving.load import answer_length, run, summary


def test_the_length_of_an_answer_is_told_by_its_head() -> None:
    answer = b"HTTP/1.1 200 OK\r\nserver: a\r\nContent-Length: 5\r\n\r\nhello"
    assert answer_length(bytearray(answer)) == len(answer)
    assert answer_length(bytearray(answer[:30])) == -1
    with pytest.raises(ValueError, match="without a length"):
        answer_length(bytearray(b"HTTP/1.1 200 OK\r\n\r\n"))


@pytest.mark.parametrize("failing", [False, True])
def test_every_client_sends_its_next_request_after_the_last_answer(failing: bool) -> None:
    under_way, most, asked = 0, 0, itertools.count()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(4) == b"body"
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(0.001)
                under_way -= 1
                status = b"500 No" if failing and next(asked) % 2 else b"200 OK"
                writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n")
                writer.write(b"{}")  # a part that comes later
        except asyncio.IncompleteReadError:
            writer.close()

    async def loaded() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        tally, num_sent = await run(f"http://127.0.0.1:{port}/a", b"body", 4, 0.5)
        server.close()
        await server.wait_closed()
        found = summary(tally, 0.5)
        assert most == 4
        assert num_sent > found["requests"] > 4
        assert (found["errors"] > 0) == failing
        assert 1 <= found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"]

    asyncio.run(loaded())


def test_ratio_is_the_median_over_rounds() -> None:
    def measured(*values: float) -> Measured:
        return Measured(loads={1: [{"p99_ms": value} for value in values]})

    found = {"gradtrail": measured(1, 10, 100), "mlflow": measured(3, 30, 50)}
    assert ratio(found, "mlflow", 1, "p99_ms") == pytest.approx(1 / 3)
