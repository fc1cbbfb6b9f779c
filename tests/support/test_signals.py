"""Asked to stop once, a process goes on to a safe place; asked again, it ends at once."""

import gc
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradtrail.support.signals import Stopped, stop_request, stopping_on_signals

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


def test_closed_terminal_is_noted_once_though_a_shell_repeats_it() -> None:
    code = SCRIPT.format(count=2, name="SIGHUP").replace('"never"', '"ignored"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"safe {signal.SIGHUP}\nignored\n", 0)


IN_TERMINAL = """
import fcntl, pathlib, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its own terminal, as it has a session of its own
from gradtrail.support.signals import stop_request
with stop_request() as request:
    print("ready", flush=True)
    while request.number is None:
        time.sleep(0.01)
    print("a line for nobody", flush=True)
    print("another", file=sys.stderr, flush=True)
pathlib.Path(sys.argv[1]).write_text(f"saved {request.number}")
"""


def test_process_whose_terminal_closed_goes_on_to_a_safe_place(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", IN_TERMINAL, str(tmp_path / "end")]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, start_new_session=True)
    os.close(end)
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    assert process.wait(60) == 0
    assert (tmp_path / "end").read_text() == f"saved {signal.SIGHUP}"


IGNORING = """
import os, signal, sys
from gradtrail.support.signals import stop_request, stopping_on_signals
numbers = [getattr(signal, name) for name in sys.argv[1:]]
with stopping_on_signals("stopped"), stop_request() as request:
    for number in numbers:
        os.kill(os.getpid(), number)
assert request.number is None
assert all(signal.getsignal(number) == signal.SIG_IGN for number in numbers)
"""


def test_signal_that_was_ignored_at_the_start_stays_ignored() -> None:
    """So `nohup` asks, and a shell for what it starts in the background."""
    names = ("SIGHUP", "SIGINT", "SIGTERM")
    ignored = f"trap '' {' '.join(name.removeprefix('SIG') for name in names)}; exec \"$@\""
    command = ["sh", "-c", ignored, "sh", sys.executable, "-c", IGNORING, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_obey_raises_only_after_a_request_and_handlers_are_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [*map(signal.getsignal, numbers), sys.unraisablehook]
    with stopping_on_signals("not here"), stop_request() as request:
        request.obey("never said")
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped, match="resumes from there") as caught:
            request.obey("`dvc repro` resumes from there")
    assert caught.value.number == signal.SIGTERM
    assert [*map(signal.getsignal, numbers), sys.unraisablehook] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["a callback of the garbage collector", "the end of an object"])
def test_signal_is_obeyed_where_python_drops_exceptions(
    where: str, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    signals = iter([number])

    def raise_first(*_: object) -> None:
        for first in signals:
            signal.raise_signal(first)

    has_slept = False
    with pytest.raises(KeyboardInterrupt) as caught, stopping_on_signals("stopped"):  # noqa: PT012
        if "collector" in where:
            gc.callbacks.append(raise_first)
            gc.collect()
        else:
            type("Ending", (), {"__del__": raise_first})()
        time.sleep(60)
        has_slept = True
    if "collector" in where:
        gc.callbacks.remove(raise_first)
    assert not has_slept
    assert getattr(caught.value, "number", signal.SIGINT) == number
    assert capfd.readouterr().err == ""
