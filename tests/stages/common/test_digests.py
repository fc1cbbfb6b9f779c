"""Our digests are those that DVC writes into `dvc.lock`."""

from pathlib import Path

import pytest
from dvc_data.hashfile.build import build
from dvc_data.hashfile.db import HashFileDB
from dvc_objects.fs.local import LocalFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradtrail.stages.common.digests import digest

NAMES = ["a", "a.txt", "a-b", "B", "ü", "日本", "a b", "é"]


def dvc_digest(path: Path, odb: Path) -> str:
    database = HashFileDB(LocalFileSystem(), str(odb))
    _, _, built = build(database, str(path), LocalFileSystem(), "md5", dry_run=True)
    return str(built.hash_info.value)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("content", [b"", b"text\n", b"windows\r\nlines\r\n", bytes(range(256)) * 5000])
def test_of_a_file(content: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, {"file": content}) / "file"
    assert digest(path) == dvc_digest(path, tmp_path / "odb")


PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(PATHS, min_size=1, max_size=8), st.data())
def test_of_any_folder(tmp_path: Path, paths: set[str], data: st.DataObject) -> None:
    files = {path for path in paths if not any(other.startswith(f"{path}/") for other in paths)}
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write(folder, {path: path.encode() for path in files})
    assert digest(folder) == dvc_digest(folder, tmp_path / "odb")
