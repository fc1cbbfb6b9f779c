"""A shared repository, and a node's folder of its own for each test."""

from pathlib import Path

import pytest
from cluster_repository import SharedRepository, make_shared_repository


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedRepository:
    monkeypatch.setenv("GRADTRAIL_CLUSTER_DIR", str(tmp_path / "node"))
    return make_shared_repository(tmp_path / "git")
