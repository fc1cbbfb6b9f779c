"""A store for the tests of this folder."""

from pathlib import Path

import pytest
from projects import empty_store


@pytest.fixture(scope="session")
def created_store() -> Path:
    return empty_store()
