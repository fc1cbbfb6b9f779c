"""A closed-loop load on a server, in a process of its own: each client sends its next request after the last answer.

    python -m benchmarks.serving.load http://127.0.0.1:8080/invocations --clients 8 --seconds 5 <body.json

Prints one JSON object. Written on asyncio's protocols, with bytes that are made once, so that it takes a small share of
what a server takes for a request; `busy` says how much of one core it took.
"""

import argparse
import asyncio
import functools
import json
import sys
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import numpy as np
import uvloop

_WARM_UP = 0.2  # of the seconds, before them


@dataclass
class Tally:
    """What the clients of one load saw."""

    seconds: list[float] = field(default_factory=list)  # of each answer
    errors: int = 0  # answers other than 200, and lost connections


class Client(asyncio.Protocol):
    """A connection that is kept, with one request under way at a time."""

    def __init__(self, request: bytes, tally: Tally, ends: float):
        self._request, self._tally, self._ends = request, tally, ends
        self._received, self._length = bytearray(), -1
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        self._received.clear()
        self._length = -1
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._length < 0:
            self._length = answer_length(self._received)
        if self._length < 0 or len(self._received) < self._length:
            return
        now = time.perf_counter()
        self._tally.seconds.append(now - self._started)
        self._tally.errors += not self._received.startswith(b"HTTP/1.1 200 ")
        if now < self._ends:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.errors += exc is not None or self._length < 0
        if not self.done.done():
            self.done.set_result(None)


def answer_length(received: bytes | bytearray) -> int:
    """Return the bytes of an answer with its head; -1 while the head is not complete."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return -1
    for line in bytes(received[:end]).split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return end + 4 + int(value)
    raise ValueError("an answer without a length")


async def run(url: str, body: bytes, num_clients: int, seconds: float) -> tuple[Tally, int]:
    """Load a server; return what its clients saw after a warm-up, and the number of all requests."""
    parts = urlsplit(url)
    request = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    tally, num_sent = Tally(), 0
    for length in (_WARM_UP * seconds, seconds):
        tally = Tally()
        ends = time.perf_counter() + length
        loop = asyncio.get_running_loop()
        made = [
            await loop.create_connection(
                functools.partial(Client, request, tally, ends), str(parts.hostname), parts.port or 80
            )
            for _ in range(num_clients)
        ]
        await asyncio.gather(*(client.done for _, client in made))
        num_sent += len(tally.seconds)
    return tally, num_sent


def summary(tally: Tally, seconds: float) -> dict[str, float]:
    """Return requests per second, and percentiles in milliseconds."""
    percents = (50, 95, 99)
    found = 1000 * np.percentile(tally.seconds, percents, method="inverted_cdf")
    by_name = {f"p{percent}_ms": value for percent, value in zip(percents, found.tolist(), strict=True)}
    number = len(tally.seconds)
    return {"requests": number, "per_second": number / seconds, "errors": tally.errors, **by_name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5)
    options = parser.parse_args()
    body = sys.stdin.buffer.read()
    started, cpu = time.perf_counter(), time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        tally, num_sent = runner.run(run(options.url, body, options.clients, options.seconds))
    busy = (time.process_time() - cpu) / (time.perf_counter() - started)
    print(json.dumps(summary(tally, options.seconds) | {"sent": num_sent, "busy": busy}))


if __name__ == "__main__":
    main()
