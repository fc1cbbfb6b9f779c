"""What the report reads, in a folder for each test, and the page of an unchanged folder."""

from pathlib import Path

import pytest
from report_folder import make_report_folder, render_page


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_report_folder(tmp_path)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render_page(make_report_folder(tmp_path_factory.mktemp("report")))
