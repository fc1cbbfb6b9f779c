"""The server as a process: start, refusal to start, draining, and HTTP below the guard."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import uvicorn
from click.testing import CliRunner
from exports import write_wrong_export
from factories import ROOT
from in_memory_server import FakeModel, application, inference
from server_process import Server, command, environment, server
from uvicorn.server import ServerState

from gradtrail.cli import gradtrail
from gradtrail.serving import serve as serving
from gradtrail.serving.server.middleware import RequestLimits
from gradtrail.support.errors import UserError

ONE = inference(np.zeros((1, 28, 28), np.uint8))
INFER = "/v2/models/digits/infer"
TOKEN = "a-secret-of-32-characters-or-so"  # noqa: S105
UNWANTED = ("mlflow", "pandas", "flax", "sklearn", "matplotlib", "pyarrow", "optax", "rich")


@pytest.mark.slow
def test_server_prints_its_address_and_imports_only_what_it_needs(folder: Path) -> None:
    options = ("--max-body-mib", "0.01", "--access-log")
    with server(folder, *options, python=("-X", "importtime")) as running:
        model = rf"digits version [0-9a-f]{{12}} \(mlp-8, sha256 [0-9a-f]{{12}}, from {re.escape(str(folder))}\)"
        line = rf"http://127\.0\.0\.1:\d+ answers with {model}, in batches of 1 \(compiling 4, 8\)"
        line += r"; ready after \d+\.\d s\n"
        assert re.fullmatch(line, running.line)
        assert running.ask("GET", "/v2/health/ready") == (200, {"ready": True})
        assert running.ask("POST", INFER, ONE)[0] == 200
        assert running.ask("POST", INFER, b" " * 10_486)[1] == {"error": "the body has more than 10,485 bytes"}
        assert f'"POST {INFER} HTTP/1.1" 413' in running.errors.read_text()
        imported = {line.rpartition("|")[2].strip() for line in running.errors.read_text().splitlines()}
        assert "jax" in imported
        assert not {name for name in imported if name.split(".")[0] in UNWANTED}
        assert running.end(signal.SIGTERM) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "digits: its answers to 1 of 1 images are not probabilities"),
        (
            ("--precision", "bfloat16", "--shadow"),
            "has no forward.cpu.bfloat16.bin; export.precisions of params.yaml adds",
        ),
    ],
)
def test_refusal_to_start_is_one_line(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    whole = command("--model", str(write_wrong_export(tmp_path / "wrong", answers="NaN")), "--port", "0", *options)
    ran = subprocess.run(whole, check=False, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert message in ran.stderr


def start_request(running: Server, body: bytes) -> socket.socket:
    """Return a connection that has sent a request without its last byte."""
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=120)
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[:-1])
    return connection


@pytest.mark.slow
def test_sigterm_answers_running_requests_and_exits_with_0(folder: Path) -> None:
    body = json.dumps(ONE).encode()
    with server(folder) as running:
        connection = start_request(running, body)
        while running.ask("GET", "/v2/health/ready")[0] != 200:
            pass
        running.process.send_signal(signal.SIGTERM)
        while _accepts(running.port):
            pass
        connection.sendall(body[-1:])
        answer = connection.makefile("rb").read()
        connection.close()
        assert answer.startswith(b"HTTP/1.1 200")
        assert running.process.wait(120) == 0


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=120).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-body-mib", "inf"), "Invalid value for '--max-body-mib': inf is not in the range 0.001<=x<=1024"),
        (("--max-wait-ms", "-1"), "Invalid value for '--max-wait-ms': -1.0 is not in the range 0<=x<=1000"),
        (("--challenger", "@next", "--canary", "0"), "must be above 0% and at most 100%, got '0'"),
        (("--host", "192.0.2.1"), "--host 192.0.2.1: the server could be reached from other machines"),
        (("--host", "127.0.0..1"), "--host 127.0.0..1 --port 8080: cannot listen there: "),
        (("--challenger", "@next"), "a challenger needs --canary SHARE or --shadow"),
    ],
)
def test_invalid_options_are_one_line(options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("GRADTRAIL_TOKEN", "" if "192.0.2.1" in options else TOKEN)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    ran = CliRunner().invoke(gradtrail, ["serve", "--model", "models/export", *options])
    assert ran.exit_code
    assert message in (str(ran.exception) if isinstance(ran.exception, UserError) else ran.output)


def test_folder_that_is_not_writable_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    (tmp_path / ".gradtrail").write_text("")
    with pytest.raises(UserError, match=r"/\.gradtrail: .*; a server writes its compilation cache and exports to"):
        serving._locate("models/export")


class Transport(asyncio.Transport):
    """Stores the sent bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.is_closed = b"", False
        self.pause_reading = self.resume_reading = lambda: None  # type: ignore[method-assign]

    def write(self, data: Any) -> None:
        self.sent += bytes(data) if not self.is_closed else b""

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def connected(state: ServerState | None = None) -> tuple[serving.Protocol, Transport]:
    """Return a connection that is open."""
    app = application(FakeModel(), limits=RequestLimits(max_seconds=0.01)).app
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, timeout_keep_alive=75)
    protocol, transport = serving.Protocol(config, state or ServerState(), {}), Transport()
    protocol.connection_made(cast(Any, transport))
    return protocol, transport


async def sent_to_the_parser(parts: list[bytes]) -> Transport:
    """Send parts of requests to the parser until it closes the connection; bodies are not read."""
    protocol, transport = connected()
    for part in parts:
        if transport.is_closed:
            break
        protocol.data_received(part)
    protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)
    return transport


_POST = b"POST /invocations HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
_GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
_TWICE = _POST + b"Content-Length: 2\r\n" * 2 + b"\r\n{}"
LONG, MANY = "the head of the request has more than 65,536 bytes", "the request has more than 100 headers"


@pytest.mark.parametrize(
    ("start", "part", "error"),
    [
        (b"GET /", b"a" * 1000, LONG),
        (b"GET / HTTP/1.1\r\na: ", b"a" * 1000, LONG),
        (b"GET / HTTP/1.1\r\n", b"a: " + b"a" * 1000 + b"\r\n", LONG),
        (_CHUNKED + b"1\r\nx\r\n0\r\n", b"a: " + b"a" * 1000 + b"\r\n", LONG),
        (b"GET / HTTP/1.1\r\n", b"a:\r\n", MANY),
        (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 50_000, b"a:\r\n", MANY),
        (b"", _GET + b"\r\n", "64 requests of this connection wait already"),
        ((_GET + b"\r\n") * 4000, b"", "64 requests of this connection wait already"),
        *((sent, b"", "Invalid HTTP request received.") for sent in (b"nonsense\r\n\r\n", _TWICE)),
        (_TWICE.replace(b"2", b"-2", 1), b"", "Invalid HTTP request received."),
    ],
)
def test_invalid_http_and_what_would_stay_in_memory_are_refused(start: bytes, part: bytes, error: str) -> None:
    transport = asyncio.run(sent_to_the_parser([start, *[part] * 300]))
    assert transport.is_closed
    assert transport.sent.startswith(b"HTTP/1.1 400")
    assert transport.sent.endswith(f'{{"error":"{error}"}}'.encode())


async def test_one_connection_too_many_is_refused_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MAX_CONNECTIONS", 3)
    state = ServerState()
    open_ones = [connected(state) for _ in range(3)]
    _, refused = connected(state)
    assert refused.sent.startswith(b"HTTP/1.1 503")
    assert b'{"error":"3 connections are open already; try again"}' in refused.sent
    assert [transport.is_closed for _, transport in (*open_ones, (None, refused))] == [False, False, False, True]


@pytest.mark.parametrize(
    ("parts", "is_read", "limit"),
    [
        ([], True, 20),  # silence
        ([b"GET / HT"], True, 20),
        ([_GET, b"a: b\r\n"], True, 20),
        ([_GET + b"\r\n", b"GET / HT"], True, 20),  # also after a request that was answered
        ([_GET + b"\r\n"], True, 75),
        ([_GET + b"\r\n", b"\r\n", b"\r\n"], True, 75),  # uvicorn's own limit ends with the first byte
        ([_POST + b"Content-Length: 9\r\n\r\n", b"a"], True, 75),  # was answered with 504
        ([_POST + b"Content-Length: 9\r\n\r\n", b"a", b"a"], True, 75),
        ([_GET + b"\r\n", _GET + b"\r\n"], False, 75),  # the client reads no answer
    ],
)
async def test_connection_without_progress_has_a_time_limit(
    parts: list[bytes], is_read: bool, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits, end_after = list[float | None](), serving.Protocol._end_after

    def record(protocol: serving.Protocol, seconds: float | None) -> None:
        set_limits.append(seconds)
        end_after(protocol, seconds)

    monkeypatch.setattr(serving.Protocol, "_end_after", record)
    protocol, transport = connected()
    if not is_read:
        protocol.pause_writing()
    for part in parts:
        protocol.data_received(part)
        while is_read and protocol.tasks:
            await asyncio.sleep(0)
    assert set_limits[-1] == limit
    assert protocol._timer is not None
    assert not protocol._timer.cancelled()
    protocol._timer._run()
    assert transport.is_closed
    protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)


@pytest.mark.parametrize(
    "parts",
    [
        [_POST + b"Content-Length: 1000000\r\n\r\n", *[b"a" * 10_000] * 100],
        [_CHUNKED, *[b"1\r\nx\r\n" * 100] * 1000],
        [b"GET /v2 HTTP/1.1\r\na: " + b"a" * 10_000 + b"\r\n\r\n"] * 60,
    ],
)
def test_long_bodies_and_many_requests_are_no_long_heads(parts: list[bytes]) -> None:
    assert b"HTTP/1.1 400" not in asyncio.run(sent_to_the_parser(parts)).sent


async def test_requests_that_are_sent_but_not_read_when_the_server_stops_are_answered() -> None:
    body, app = json.dumps(inference(np.zeros((1, 4, 3), np.uint8))).encode(), application(FakeModel())
    request = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    clients = list[socket.socket]()

    class Stopping(serving.Server):
        async def on_tick(self, counter: int) -> bool:
            """Stop in the same step of the event loop in which requests arrive."""
            if self.server_state.total_requests:
                clients.append(socket.create_connection(listener.getsockname()))
                for client in clients:
                    client.sendall(request)
                self._drain()
            return self.should_exit

    with serving._listening("127.0.0.1", 0) as listener:
        clients.append(socket.create_connection(listener.getsockname()))  # it stays open after its first request
        clients[0].sendall(request)
        config = uvicorn.Config(app.app, http=serving.Protocol, ws="none", lifespan="off", log_config=None)
        server = Stopping(config)
        server.router = app.router
        await server.serve(sockets=[listener])
    for client, count in zip(clients, (2, 1), strict=True):
        with client, client.makefile("rb") as stream:
            answers = stream.read()
        assert answers.count(b"HTTP/1.1 200 OK") == count
        assert answers.rpartition(b"HTTP/1.1")[2].count(b"connection: close") == 1


@pytest.mark.slow
def test_memory_stays_bounded_whatever_arrives(folder: Path) -> None:
    """Unfinished bodies of 15 MiB on a hundred connections, and heads that never end."""
    with server(folder) as running:
        memory = psutil.Process(running.process.pid).memory_info
        before, connections = memory().rss, list[socket.socket]()
        for number in range(200):
            connections.append(connection := socket.create_connection(("127.0.0.1", running.port), timeout=120))
            head = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 60_000
            body = _POST + b"Content-Length: 16777216\r\n\r\n" + b" " * (15 * 2**20)
            with contextlib.suppress(OSError):  # it was refused
                connection.sendall(head if number % 2 else body)
        assert running.ask("GET", "/v2/health/ready") == (200, {"ready": True})
        assert memory().rss - before < 1.5 * RequestLimits.max_total_bytes
        for connection in connections:
            connection.close()
        running.wait(lambda: running.ask("POST", INFER, ONE)[0] == 200)


@pytest.mark.slow
@pytest.mark.parametrize(("drain_seconds", "status"), [("0.5", 0), ("60", 128 + signal.SIGTERM)])
def test_endless_request_is_ended_after_drain_seconds_or_by_a_second_signal(
    drain_seconds: str, status: int, folder: Path
) -> None:
    with server(folder, "--drain-seconds", drain_seconds) as running:
        connection = start_request(running, b"{}")
        assert running.ask("GET", "/v2/health/live")[0] == 200
        running.process.send_signal(signal.SIGTERM)
        while _accepts(running.port):
            pass
        if status:
            running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(120) == status
        connection.close()


@pytest.mark.slow
def test_thread_that_hangs_does_not_keep_the_server_running(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a registry that takes connections and never answers
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = command("--model", "models:/digits@champion", "--port", "0")
        with subprocess.Popen(arguments, cwd=ROOT, env=environment(MLFLOW_TRACKING_URI=uri)) as process:
            connection, _ = silent.accept()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            connection.close()
