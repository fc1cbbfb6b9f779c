"""A store for the tests of this folder."""

from pathlib import Path

import pytest
from model_store import create_store


@pytest.fixture(scope="session")
def created_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    create_store(folder, at_once=1)
    return folder
