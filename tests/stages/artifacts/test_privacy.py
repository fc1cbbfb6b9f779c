"""The guarantee of a private training as a file: it round-trips, and damage is one line."""

from pathlib import Path

import pytest
from stage_results import a_guarantee

from gradtrail.stages.artifacts.privacy import read_guarantee, write_guarantee
from gradtrail.support.errors import UserError


def test_promise_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_guarantee(tmp_path) is None, "of a training that is not private"
    write_guarantee(tmp_path, a_guarantee())
    assert read_guarantee(tmp_path) == a_guarantee()
    assert a_guarantee().rate == 64 / 640


def test_truncated_promise_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text('{"epsilon": 1')
    with pytest.raises(UserError, match=r"privacy\.json: not readable as JSON: "):
        read_guarantee(tmp_path)
