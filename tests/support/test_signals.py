"""Asked to stop once, a process goes on to a safe place; asked again, it ends at once."""

import signal
import subprocess
import sys

import pytest

from gradtrail.support.signals import Stopped, stop_request

SCRIPT = """
import os, signal, sys
from gradtrail.support.signals import stop_request
with stop_request() as request:
    for count in range({count}):
        os.kill(os.getpid(), signal.{name})
    print("safe", request.number, flush=True)
os.kill(os.getpid(), signal.{name})
print("never")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_first_signal_is_noted_and_the_second_ends_at_once(name: str) -> None:
    number = getattr(signal, name)
    once, twice = (
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(count=count, name=name)], capture_output=True, text=True, check=False
        )
        for count in (1, 2)
    )
    assert once.stdout == f"safe {number}\n"
    assert once.returncode != 0, "after the block a signal does what it did before"
    assert (twice.stdout, twice.returncode) == ("", 128 + number)


def test_whoever_obeys_stops_only_if_asked() -> None:
    with stop_request() as request:
        request.obey("never said")
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped, match="resumes from there") as caught:
            request.obey("`dvc repro` resumes from there")
    assert caught.value.number == signal.SIGTERM
