"""What a private training promises, as a file: it is read as it was written, and damage is one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from stage_results import a_promise

from gradtrail.stages.artifacts.privacy import read_promise, write_promise
from gradtrail.support.errors import UserError


def test_a_promise_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_promise(tmp_path) is None, "of a training that is not private"
    write_promise(tmp_path, a_promise())
    assert read_promise(tmp_path) == a_promise()
    assert a_promise().rate == 64 / 640


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epsilon": -1}, "epsilon"),
        ({"epsilon": "3"}, "epsilon"),
        ({"delta": 1.5}, "delta"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 10_000}, "batch_size"),
        ({"sampling": "shuffle"}, "sampling"),
        ({"release": 1}, "release"),
        ({"other": 1}, "other"),
        ({"members": None}, "members"),
    ],
)
def test_a_damaged_promise_is_one_line(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    content = dataclasses.asdict(a_promise()) | change
    (tmp_path / "privacy.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=said) as caught:
        read_promise(tmp_path)
    assert "\n" not in str(caught.value)
    assert "privacy.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "{" * 100_000, "1e999"])
def test_what_is_no_promise_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text(text)
    with pytest.raises(UserError, match=r"^[^\n]*privacy\.json[^\n]*$"):
        read_promise(tmp_path)


def test_a_promise_that_lacks_a_part_is_one_line(tmp_path: Path) -> None:
    for name in dataclasses.asdict(a_promise()):
        content = {key: value for key, value in dataclasses.asdict(a_promise()).items() if key != name}
        (tmp_path / "privacy.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=name):
            read_promise(tmp_path)
