"""A store for the tests of this folder."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from registered import create_store


@dataclass(frozen=True)
class CreatedStore:
    """A store in a folder, and the status and output of each of the processes that created it at once."""

    folder: Path
    processes: list[tuple[int, bytes]]


@pytest.fixture(scope="session")
def created_store(tmp_path_factory: pytest.TempPathFactory) -> CreatedStore:
    folder = tmp_path_factory.mktemp("store")
    return CreatedStore(folder, create_store(folder, at_once=2))
