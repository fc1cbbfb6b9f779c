"""Damage as a strategy, and the duty of readers of damaged bytes: one line, quickly, in little memory.

Used for what comes from outside: data sets, images, exports, HLO, label corrections.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from gradtrail.support.errors import UserError

MAX_LINE = 1000

on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell of memory")


def fuzz(max_examples: int) -> settings:
    """Settings of a test that writes every example over the last one."""
    return settings(max_examples=max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Return `data` after one to four flips, cuts and insertions."""
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "flip", "set", "cut", "insert", "end"])):
            case "flip":
                flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[place : place + 1])
                data = data[:place] + flipped + data[place + 1 :]
            case "set":
                data = data[:place] + draw(st.binary(min_size=1, max_size=1)) + data[place + 1 :]
            case "cut":
                data = data[:place] + data[place + draw(st.integers(1, 20)) :]
            case "insert":
                data = data[:place] + draw(st.binary(min_size=1, max_size=5)) + data[place:]
            case "end":
                data = data[:place]
    return data


def refusal(read: Callable[[], object]) -> str | None:
    """Return the one line with which something is refused, or None where it is read."""
    try:
        read()
    except UserError as error:
        line = str(error)
    else:
        return None
    assert len(line.splitlines()) == 1
    assert len(line) <= MAX_LINE
    return line


def taken_bytes(action: Callable[[], object]) -> int:
    """Return by how many bytes the process grew at most while something was done."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of before
    before = status_bytes("VmRSS")
    action()
    return status_bytes("VmHWM") - before


def status_bytes(key: str, process: int | str = "self") -> int:
    """Return a figure of what the system says of a process: `VmRSS` is its memory now, `VmHWM` at its peak."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))
