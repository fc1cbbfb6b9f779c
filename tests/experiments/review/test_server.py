"""The server answers its own page alone, whatever is sent to it, and only on loopback."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from flask.testing import FlaskClient
from projects import environment
from reviewing import new_review, write_project

from gradtrail.experiments.review import server
from gradtrail.stages.preprocess.corrections import read_corrections
from gradtrail.support.errors import UserError

HOST = "localhost"  # as which the client asks
SRC = Path(__file__).parents[3] / "src"


@pytest.fixture
def client(tmp_path: Path) -> FlaskClient:
    return new_client(tmp_path)


def new_client(folder: Path, link: str = "/?token=secret") -> FlaskClient:
    app = server.make_app(new_review(folder), "secret")
    app.testing = True  # a bug is raised, not answered
    client = app.test_client()
    client.get(link)
    return client


def test_page_loads_only_its_own_files(client: FlaskClient) -> None:
    page = client.get("/")
    assert page.mimetype == "text/html"
    references = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert sorted(references) == ["/page.css", "/page.js", "data:,"]
    for path in ("/page.css", "/page.js"):
        text = client.get(path).text
        assert text
        assert "http" not in text
        assert "url(" not in text
    for path in ("/", "/page.js", "/api/state", "/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:5001"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:8080"},  # another server on this machine
    ],
)
def test_requests_of_other_pages_are_refused(client: FlaskClient, tmp_path: Path, headers: dict[str, str]) -> None:
    for path in ("/", "/api/state", "/api/images/0"):
        assert client.get(path, headers=headers).status_code in (400, 403)
    answer = client.post("/api/decide", json={"index": 0, "new": 0, "reason": ""}, headers=headers)
    assert answer.status_code in (400, 403)
    assert not (tmp_path / "corrections.csv").exists()


@pytest.mark.parametrize("link", ["/", "/?token=secre", "/?token=sécret", "/page.js?token=secret"])
def test_request_without_the_token_is_refused(tmp_path: Path, link: str) -> None:
    client = new_client(tmp_path, link)
    for path in ("/", "/page.js", "/api/state", "/api/images/0", "/nothing"):
        assert client.get(path).status_code == 403
    assert client.post("/api/decide", json={"index": 0, "new": 0, "reason": ""}).status_code == 403
    assert not (tmp_path / "corrections.csv").exists()


def test_link_sets_a_cookie_that_scripts_cannot_read(client: FlaskClient) -> None:
    answer = client.get("/?token=secret", follow_redirects=False)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    assert re.fullmatch(r"review-\w{8}=secret; HttpOnly; Path=/; SameSite=Strict", answer.headers["Set-Cookie"])


@pytest.mark.parametrize(
    "headers", [{}, {"Origin": f"http://{HOST}"}, {"Host": "localhost:8123", "Origin": "http://localhost:8123"}]
)
def test_own_page_is_answered_through_a_forwarded_port(client: FlaskClient, headers: dict[str, str]) -> None:
    assert client.post("/api/decide", json={"index": 0, "new": 0, "reason": ""}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "sent", "status"),
    [
        ("/api/decide", {"data": '{"index": 0, "new": 0, "reason": ""}'}, 415),  # as a form of another page could
        ("/api/undo", {}, 415),
        ("/api/decide", {"data": "{", "content_type": "application/json"}, 400),
        ("/api/decide", {"json": {"index": 0, "new": 0, "reason": "", "file": "a"}}, 400),
        ("/api/decide", {"json": {"index": "0", "new": 0, "reason": ""}}, 400),
        ("/api/decide", {"json": {"index": 99, "new": 0, "reason": ""}}, 400),
        ("/api/decide", {"json": {"index": 0, "new": 0, "reason": "a" * 5000}}, 413),
        ("/api/state", {"json": {}}, 405),
    ],
)
def test_invalid_decision_is_refused_in_one_line(
    client: FlaskClient, tmp_path: Path, path: str, sent: dict[str, Any], status: int
) -> None:
    answer = client.post(path, **sent)
    assert answer.status_code == status
    assert len(answer.json["error"].splitlines()) == 1
    assert not (tmp_path / "corrections.csv").exists()


def test_used_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"^--port {port}: cannot be opened on 127.0.0.1 \(Address already in use"):
            server.open_port(port)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `gradtrail review` in a folder; yield it with the link that it printed."""
    command = [sys.executable, "-m", "gradtrail", "review", "--port", "0", "--reviewer", "Ann"]
    env = environment() | {"PYTHONPATH": str(SRC)}
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            match = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{40,}", line)
            assert match, line
            yield process, match.group()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_server_and_a_kill_loses_no_decision(tmp_path: Path, number: signal.Signals) -> None:
    write_project(tmp_path)
    for part in (".dvc", "src/gradtrail"):  # of a project
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "dvc.yaml").touch()
    decision = {"index": 0, "new": 1, "reason": ""}
    with started(tmp_path) as (process, link), requests.Session() as session:
        address = session.get(link, timeout=60).url
        assert session.post(f"{address}api/decide", json=decision, timeout=60).status_code == 200
        os.kill(process.pid, signal.SIGKILL)
    assert len(read_corrections(tmp_path / "pipeline" / "corrections.csv")) == 1
    with started(tmp_path) as (process, link), requests.Session() as session:
        address = session.get(link, timeout=60).url
        assert session.get(f"{address}api/state", timeout=60).json()["progress"]["decided"] == 1
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    assert output.strip().startswith("1 of 41 labels reviewed: ")
