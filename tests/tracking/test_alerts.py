"""A training that needs attention is reported once, and nothing that fails in reporting costs it anything."""

import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.tracking import alerts
from gradtrail.tracking.alerts import Sender, Watch

CLASSES = 10
PAYLOAD = {"state": "a1", "stage": "train", "alert": "stalled", "message": "no change", "epoch": 3, "metrics": {}}
losses_of = st.lists(st.floats(0.001, 50), min_size=1, max_size=15)


def raised(
    losses: list[float], accuracies: list[float] | None = None, rates: list[float] | None = None, epochs: int = 0
) -> list[tuple[int, str]]:
    """Return the kinds of the alerts of a training, each with its first epoch."""
    watch, found = Watch(epochs or len(losses), CLASSES), []
    for index, loss in enumerate(losses):
        accuracy = accuracies[index] if accuracies else 0.5
        metrics = {"epoch": index + 1, "cross_entropy": loss, "validation_accuracy": accuracy}
        alerts = watch.after_epoch(metrics, rates[index] if rates else 1.0)
        found += [(index + 1, alert.kind) for alert in alerts if alert.kind not in {kind for _, kind in found}]
    return found


@given(losses_of)
def test_loss_that_falls_from_that_of_guessing_raises_nothing(losses: list[float]) -> None:
    falling = sorted(({min(loss, 9.0) for loss in losses}), reverse=True)
    kinds = {kind for _, kind in raised([loss * 0.99**index for index, loss in enumerate(falling)], epochs=100)}
    assert kinds == set()


@given(losses_of)
def test_diverged_is_the_first_loss_above_four_times_the_best_before_it(losses: list[float]) -> None:
    guessing = math.log(CLASSES)
    best = [min([guessing, *losses[:index]]) for index in range(len(losses))]
    expected = [i + 1 for i, loss in enumerate(losses) if loss > 4 * best[i] and loss > guessing / 2]
    assert [epoch for epoch, kind in raised(losses) if kind == "diverged"] == expected[:1]


def test_stalled_is_three_epochs_without_progress_if_as_many_are_left() -> None:
    assert raised([2.3] * 10) == [(4, "stalled")]
    assert raised([2.3] * 6) == [], "nothing is to be saved"
    assert raised([2.3, 2.29, 2.28, 2.27, 2.26, 2.25], epochs=20) == []
    assert raised([2.3] * 6, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], epochs=20) == []
    assert raised([math.nan] * 9, [0.9] * 9, epochs=20) == [(4, "stalled")], "a loss that is not published"


def test_network_that_converges_at_the_end_of_a_schedule_did_not_stall() -> None:
    epochs = 60
    rates = [(1 + math.cos(math.pi * epoch / epochs)) / 2 for epoch in range(1, epochs + 1)]
    losses = [max(0.04, 2.3 * 0.9**epoch) for epoch in range(epochs)]
    converged = [min(0.985, 0.9 + 0.085 * epoch / 51) for epoch in range(1, epochs + 1)]
    assert raised(losses, converged, rates) == []
    stuck = [min(0.4, 0.1 * epoch) for epoch in range(1, epochs + 1)]
    assert raised([max(1.6, loss) for loss in losses], stuck, rates) == [(8, "stalled")]


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any], list[int]]]:
    """Return address, received bodies, and the statuses to answer with."""
    received: list[Any] = []
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses.pop() if statuses else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/secret", received, statuses
        http.shutdown()
        thread.join()


def test_webhook_gets_json_and_its_address_may_be_a_variable(
    server: tuple[str, list[Any], list[int]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALERT_URL", server[0])
    for target in (server[0], "$ALERT_URL"):
        Sender(target).send(PAYLOAD).join()
    assert server[1] == [PAYLOAD, PAYLOAD]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("target", "value"), [("$ALERT_URL", None), ("$ALERT_URL", ""), (" ", None)])
def test_target_that_is_empty_or_not_set_is_a_warning_at_the_start(
    target: str, value: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ALERT_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("ALERT_URL", value)
    sender = Sender(target)
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"warning: runtime.alert: {target.strip()!r} is empty or not set; no alert will be sent"
    sender.send(PAYLOAD).join()
    assert capfd.readouterr() == ("", "")


def test_dead_webhook_is_one_warning_without_its_address(
    server: tuple[str, list[Any], list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    server[2].extend([500, 404])
    sender = Sender(server[0])
    for _ in range(2):
        sender.send(PAYLOAD).join()
    Sender("http://127.0.0.1:9/secret").send(PAYLOAD).join()
    Sender("http://127.0.0.1:9/a secret").send(PAYLOAD).join()
    lines = capfd.readouterr().err.splitlines()
    start = "warning: runtime.alert: an alert could not be sent"
    assert lines == [f"{start} ({reason})" for reason in ("HTTPError, status 404", "URLError", "InvalidURL")]


def test_command_gets_the_message_and_does_not_hold_the_training_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Sender(f"cat > '{tmp_path}/line'; echo noise").send(PAYLOAD).join()
    assert (tmp_path / "line").read_text() == "train: stalled: no change\n"
    waiting = Sender(f"until [ -e '{tmp_path}/go' ]; do sleep 0.05; done; touch '{tmp_path}/ended'").send(PAYLOAD)
    assert not (tmp_path / "ended").exists()
    (tmp_path / "go").touch()
    waiting.join()
    assert (tmp_path / "ended").exists()
    monkeypatch.setattr(alerts, "_SEND_SECONDS", 0.3)
    Sender("exec sleep 60").send(PAYLOAD).join()
    Sender("exit 3").send(PAYLOAD).join()
    Sender("").send(PAYLOAD).join()
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.partition("sent ")[2] for line in err.splitlines()] == [
        "(TimeoutExpired)",
        "(CalledProcessError, status 3)",
    ]
