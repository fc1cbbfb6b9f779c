"""A command that fails is one line that says why, without credentials and without a question."""

import sys
import time
from pathlib import Path

import pytest

from gradtrail.support.git import strict_git
from gradtrail.support.shell import CommandError, reason, run


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("", "no output"),
        ("one\n\ntwo\n", "two"),
        ("fatal: no such thing\nfatal: Could not read from remote repository.\n", "no such thing"),
        ("train: train.seed must be\nERROR: failed to reproduce 'train': exited with 2\n", "train: train.seed must be"),
        (
            "ERROR: unexpected error - Unable to locate credentials\n\nHaving any troubles? Hit us up\n",
            "unexpected error - Unable to locate credentials",
        ),
        ("ERROR: failed to reproduce 'train'\n", "failed to reproduce 'train'"),
    ],
)
def test_reason_is_the_last_line_that_is_no_consequence(output: str, why: str) -> None:
    assert reason(output) == why


def test_command_returns_its_output_or_fails_in_one_line_without_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run([sys.executable, "-c", "print(input())"], stdin="words") == "words"
    monkeypatch.setenv("SOME_TOKEN", "very-secret")
    failing = "import os, sys; sys.exit('denied for ' + os.environ['SOME_TOKEN'])"
    with pytest.raises(CommandError, match=r"failed: denied for \*\*\*$") as caught:
        run([sys.executable, "-c", failing])
    assert "\n" not in str(caught.value)
    with pytest.raises(CommandError, match=r"`no-such-program x`: no-such-program is not installed"):
        run(["no-such-program", "x"])


def test_git_does_not_prompt(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"^`git clone` failed: "):
        strict_git("clone", "https://127.0.0.1:9/private.git", str(tmp_path / "x"))


def test_hanging_command_is_killed_with_its_children() -> None:
    began = time.monotonic()
    with pytest.raises(CommandError, match=r"^`sh -c` did not end within 0 s$"):
        run(["sh", "-c", "sleep 30 & wait"], seconds=0.2)
    assert time.monotonic() - began < 15
