"""Calls of the store come in order, and cost no more waiting than was granted."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from gradtrail.tracking.mlflow.calls import StoreCalls, StoreTooSlowError


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hung call waits for; opened in the end, so that its thread ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_results_and_faults_come_back(gate: threading.Event) -> None:
    calls = StoreCalls(None)
    assert calls.wait(lambda: 7) == 7
    with pytest.raises(ConnectionError, match="gone"):
        calls.wait(fail)
    assert calls.wait(lambda: 8) == 8, "a fault is no end"


def test_waiting_adds_up_to_what_was_granted_and_no_more(gate: threading.Event) -> None:
    calls = StoreCalls(1.5)
    calls.wait(lambda: time.sleep(0.1))
    calls.wait(lambda: time.sleep(0.1))
    assert calls.waited >= 0.2
    with pytest.raises(StoreTooSlowError, match=r"no answer within 1\.5 s in all"):
        calls.wait(gate.wait)
    assert 1.5 <= (waited := calls.waited) < 3
    made: list[int] = []
    with pytest.raises(StoreTooSlowError):
        calls.wait(lambda: made.append(1))
    assert calls.waited < waited + 0.5, "nothing is left to wait"
    gate.set()
    time.sleep(0.2)
    assert made == [], "what nobody waits for any more is not made"


def test_a_store_without_a_limit_takes_what_it_takes() -> None:
    calls = StoreCalls(None)
    calls.hurry()
    calls.wait(lambda: time.sleep(0.5))
    assert calls.waited >= 0.5


def test_an_offered_call_is_not_waited_for_and_dropped_where_one_is_at_work(gate: threading.Event) -> None:
    calls, made = StoreCalls(10), list[str]()
    assert calls.offer(lambda: (made.append("first"), gate.wait()))
    assert not calls.offer(lambda: made.append("dropped"))
    assert calls.waited == 0
    gate.set()
    calls.wait(lambda: made.append("waited for"))
    assert calls.offer(lambda: made.append("second"))
    calls.wait(lambda: None)
    assert made == ["first", "waited for", "second"]


def test_the_fault_of_an_offered_call_is_raised_when_the_next_is_waited_for() -> None:
    calls = StoreCalls(10)
    assert calls.offer(fail)
    with pytest.raises(ConnectionError, match="gone"):
        calls.wait(lambda: None)
    assert calls.wait(lambda: 3) == 3, "it is raised once"


def test_the_fault_of_an_offered_call_is_raised_when_the_next_is_offered() -> None:
    calls = StoreCalls(10)
    assert calls.offer(fail)
    with pytest.raises(ConnectionError, match="gone"):
        offer_when_idle(calls)
    offer_when_idle(calls)


def offer_when_idle(calls: StoreCalls) -> None:
    while not calls.offer(lambda: None):
        time.sleep(0.01)


def test_whoever_hurries_waits_two_seconds_more(gate: threading.Event) -> None:
    calls = StoreCalls(60)
    timer = threading.Timer(0.2, calls.hurry)
    timer.start()
    with pytest.raises(StoreTooSlowError):
        calls.wait(gate.wait)
    assert 2 <= calls.waited < 10


def test_a_hung_call_does_not_hold_up_the_end_of_the_process() -> None:
    script = """
import threading
from gradtrail.tracking.mlflow.calls import StoreCalls, StoreTooSlowError
try:
    StoreCalls(0.1).wait(threading.Event().wait)
except StoreTooSlowError:
    print("over")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "over\n"


def fail() -> None:
    raise ConnectionError("gone")
