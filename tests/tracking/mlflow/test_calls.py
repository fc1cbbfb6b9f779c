"""Calls of the store are made in order, and no longer waited for than allowed."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from gradtrail.tracking.mlflow import calls as store_calls
from gradtrail.tracking.mlflow.calls import StoreCalls, StoreTooSlowError


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hung call waits for; opened in the end, so that its thread ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_results_and_faults_are_passed_on() -> None:
    calls = StoreCalls(None)
    assert calls.wait(lambda: 7) == 7
    with pytest.raises(ConnectionError, match="gone"):
        calls.wait(fail)
    assert calls.wait(lambda: 8) == 8, "after a fault the next call is made"


def test_waiting_adds_up_to_the_limit_and_not_beyond(gate: threading.Event) -> None:
    calls = StoreCalls(0.3)
    calls.wait(lambda: time.sleep(0.05))
    calls.wait(lambda: time.sleep(0.05))
    assert calls.waited >= 0.1
    with pytest.raises(StoreTooSlowError, match=r"no answer within 0\.3 s in all"):
        calls.wait(gate.wait)
    waited = calls.waited
    assert waited >= 0.3
    made: list[int] = []
    with pytest.raises(StoreTooSlowError):
        calls.wait(lambda: made.append(1))
    last: list[int] = []
    calls._start(lambda: last.append(2))  # behind the unwanted call in the queue
    gate.set()
    while not last:
        time.sleep(0.01)
    assert made == [], "a call that timed out before it began is not made"


def test_without_a_limit_a_call_may_take_long(gate: threading.Event) -> None:
    calls = StoreCalls(None)
    calls.hurry()
    threading.Timer(0.3, gate.set).start()
    assert calls.wait(gate.wait)
    assert calls.waited >= 0.2


def test_an_offered_call_is_not_waited_for_and_dropped_while_another_is_in_progress(gate: threading.Event) -> None:
    calls, made = StoreCalls(10), list[str]()
    assert calls.offer(lambda: (made.append("first"), gate.wait()))
    assert not calls.offer(lambda: made.append("dropped"))
    assert calls.waited == 0
    gate.set()
    calls.wait(lambda: made.append("waited for"))
    assert calls.offer(lambda: made.append("second"))
    calls.wait(lambda: None)
    assert made == ["first", "waited for", "second"]


def test_the_fault_of_an_offered_call_is_raised_once_by_the_next_call() -> None:
    calls = StoreCalls(10)
    assert calls.offer(fail)
    with pytest.raises(ConnectionError, match="gone"):
        calls.wait(lambda: None)
    assert calls.wait(lambda: 3) == 3
    assert calls.offer(fail)
    with pytest.raises(ConnectionError, match="gone"):
        offer_when_idle(calls)
    offer_when_idle(calls)


def offer_when_idle(calls: StoreCalls) -> None:
    while not calls.offer(lambda: None):
        time.sleep(0.01)


def test_hurry_lowers_the_limit_of_a_call_that_is_waited_for(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_calls, "_HURRIED_SECONDS", 0.2)
    calls = StoreCalls(600)
    threading.Timer(0.1, calls.hurry).start()
    with pytest.raises(StoreTooSlowError):
        calls.wait(gate.wait)
    assert 0.2 <= calls.waited < 300


def test_a_hung_call_does_not_delay_the_end_of_the_process() -> None:
    script = """
import threading
from gradtrail.tracking.mlflow.calls import StoreCalls, StoreTooSlowError
try:
    StoreCalls(0.1).wait(threading.Event().wait)
except StoreTooSlowError:
    print("over")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "over\n"


def fail() -> None:
    raise ConnectionError("gone")
