"""What the report reads, in a folder for each test."""

from pathlib import Path

import pytest
from report_folder import make_report_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_report_folder(tmp_path)
