"""A bar is drawn on stderr only where that is a terminal; lines are always written."""

import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from gradtrail.support.progress import Unit, progress_bar, sparkline, stdout_console


def test_without_a_terminal_there_are_only_lines(capfd: pytest.CaptureFixture[str]) -> None:
    line = f"[rates] {'low, seed 0 ' * 20}: done"  # longer than a console, with brackets that are no markup
    with progress_bar("train", 3, unit="steps") as bar:
        bar.advance(message="epoch 1/3")
        bar.print(line)
        bar.log("a line for logs")
        bar.update(3)
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(rf"train: epoch 1/3 \(33 %, \d+\.\d s\)\n{re.escape(line)}\na line for logs\n", err)


@pytest.mark.parametrize(("unit", "count"), [("steps", "3/10"), ("bytes", "3/10 bytes")])
def test_a_bar_on_a_terminal_shows_count_and_last_message_as_they_are(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unit: Unit, count: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("[train]", 10, unit=unit) as bar:
        bar.update(2, message="epoch [1/3] loss 0.05")
        bar.advance()
        bar.log("a line for logs")
    out, err = capfd.readouterr()
    assert out == ""
    assert all(text in re.sub(r"\x1b\[[\d;]*m", "", err) for text in (count, "[train]", "epoch [1/3] loss 0.05"))
    assert "a line for logs" not in err


@given(st.lists(st.one_of(st.floats(1e-3, 1e3), st.just(0.0), st.just(math.nan)), min_size=1), st.integers(1, 60))
def test_sparkline_has_a_block_for_each_part_with_a_value_in_their_order(values: list[float], width: int) -> None:
    line = sparkline(np.array(values), width)
    assert len(line) == width
    assert (line.strip() == "") == all(map(math.isnan, values))
    if len(values) == width:
        assert [block == " " for block in line] == [math.isnan(value) for value in values]
        known = [(value, block) for value, block in zip(values, line, strict=True) if block != " "]
        assert [block for _, block in sorted(known)] == sorted(block for _, block in known)
    assert sparkline(np.array([1.0, 10.0, 100.0]), 3) == "▁▅█"


@pytest.mark.parametrize("columns", [20, 80, 120])
def test_curves_fit_the_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("train", 10, unit="steps") as bar:
        bar.update(10, message="epoch 1")
        bar.draw({"validation error": (np.geomspace(0.5, 0.01, 300), ".2%")})
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capfd.readouterr().err).splitlines()
    assert all(len(line) <= columns for line in lines)
    drawn = [line for line in lines if "█" in line]
    assert bool(drawn) == (columns > 36)
    assert all(line.endswith("50.00% → 1.00%") for line in drawn)


def test_control_characters_of_texts_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "a\x1b]0;title\x07b\x1b[2J [red]c[/] \x9b31m \u202e"
    monkeypatch.setenv("COLUMNS", "200")
    for kind in ("dumb", "xterm-256color"):
        monkeypatch.setenv("TERM", kind)
        monkeypatch.setenv("FORCE_COLOR", "1")
        table = Table("run")
        table.add_row(name, style="bold")
        console = stdout_console()
        for printed in (name, Text(name, style="bold"), table):
            console.print(printed, soft_wrap=True)
            out = re.sub(r"\x1b\[[\d;]*m", "", capfd.readouterr().out)  # the console's own styles
            assert r"\x1b]0;title" in out
            assert r"\x1b[2J [red]c" in out
            assert all(character.isprintable() for character in out.replace("\n", ""))


CODE = "from gradtrail.support.running_time import seconds_running; print(seconds_running())"


def test_a_process_knows_how_long_it_runs() -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CODE], check=True, stdout=subprocess.PIPE, text=True)
    assert 0 < float(done.stdout) < time.monotonic() - started + 0.02, "ticks are hundredths"
