"""What a private training promises, as a file: it is read as it was written, and damage is one line."""

from pathlib import Path

import pytest
from stage_results import a_promise

from gradtrail.stages.artifacts.privacy import read_promise, write_promise
from gradtrail.support.errors import UserError


def test_a_promise_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_promise(tmp_path) is None, "of a training that is not private"
    write_promise(tmp_path, a_promise())
    assert read_promise(tmp_path) == a_promise()
    assert a_promise().rate == 64 / 640


def test_truncated_promise_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text('{"epsilon": 1')
    with pytest.raises(UserError, match=r"privacy\.json: not readable as JSON: "):
        read_promise(tmp_path)
