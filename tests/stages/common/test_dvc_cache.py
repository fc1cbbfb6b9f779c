"""Files come from the cache of DVC by the digests that DVC writes, and only with the right bytes."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest
from dvc.config import Config
from dvc.ignore import DvcIgnoreFilter
from dvc_data.hashfile.build import build
from dvc_data.hashfile.db import HashFileDB
from dvc_objects.fs.local import LocalFileSystem
from factories import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from platformdirs.macos import MacOS
from platformdirs.unix import Unix

from gradtrail.stages.common import dvc_cache
from gradtrail.stages.common.dvc_cache import cache_folder, digest_within, is_here, restore
from gradtrail.stages.common.files import digest, stamps_of


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / ".dvc").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DVC_ROOT", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    dvc_cache._configured_cache.cache_clear()
    return folder


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "to"


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def keep(content: bytes, ending: str = "") -> str:
    md5 = hashlib.md5(content).hexdigest() + ending  # noqa: S324
    write(cache_folder() / "files" / "md5", {f"{md5[:2]}/{md5[2:]}": content})
    return md5


def keep_folder(files: dict[str, bytes]) -> str:
    listed = [{"md5": keep(content), "relpath": name} for name, content in sorted(files.items())]
    return keep(json.dumps(listed, sort_keys=True).encode(), ".dir")


def test_file_and_a_folder_come_from_the_cache(to: Path) -> None:
    assert restore("models/final", keep(b"weights"), to, "")
    assert (to / "models/final").read_bytes() == b"weights"
    assert restore("results", keep_folder({"a.txt": b"a", "b/c.txt": b"c"}), to, "")
    assert (to / "results/b/c.txt").read_bytes() == b"c"
    assert is_here("models/epochs", keep_folder({}))
    assert restore("models/epochs", keep_folder({}), to, "")
    assert (to / "models/epochs").is_dir()


def test_output_is_here_if_in_cache_or_working_folder(project: Path) -> None:
    folder = keep_folder({"a.txt": b"a", "b.txt": b"b"})
    assert is_here("data", folder)
    lost = hashlib.md5(b"b").hexdigest()  # noqa: S324
    shutil.rmtree(cache_folder() / "files" / "md5" / lost[:2])
    assert not is_here("data", folder)
    assert not is_here("data", "0" * 32 + ".dir")
    write(project / "data", {"a.txt": b"a", "b.txt": b"b"})
    assert is_here("data", folder)


def test_working_folder_serves_only_with_the_right_bytes(to: Path, project: Path) -> None:
    (project / "out").write_text("now")
    md5 = digest(project / "out")
    assert restore("out", md5, to, "")
    (project / "out").write_text("other")
    assert not restore("out", md5, to, "")
    assert not (to / "out").exists()


def test_folder_that_was_written_since_is_digested_again(to: Path, project: Path) -> None:
    (project / "data").mkdir()
    path = project / "data" / "a.txt"
    path.write_text("one")
    md5 = digest(project / "data")
    for seconds in (100, 90):
        os.utime(path, (time.time() - seconds,) * 2)
        assert is_here("data", md5)
    path.write_text("two")
    assert not is_here("data", md5)
    assert not restore("data", md5, to, "")


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"wei"), Path.unlink])
def test_damaged_cache_does_not_serve(damage: Callable[[Path], object], to: Path) -> None:
    folder, md5 = keep_folder({"a.txt": b"a", "b.txt": b"weights"}), keep(b"weights")
    damage(cache_folder() / "files" / "md5" / md5[:2] / md5[2:])
    for digest_of_out in (md5, folder):
        assert not restore("out", digest_of_out, to, "")
        assert not (to / "out").exists()


def test_digest_within_a_folder(to: Path) -> None:
    folder = keep_folder({"train.npz": b"t", "shards/0.npy": b"0", "shards/index.json": b"i"})
    assert restore("data", folder, to, "")
    assert digest_within("data", folder, "data/shards") == digest(to / "data/shards")
    assert digest_within("data", folder, "data/shard") is None
    assert digest_within("data", folder, "data/train.npz") == hashlib.md5(b"t").hexdigest()  # noqa: S324
    assert digest_within("data", folder, "data") == folder
    assert digest_within("data", folder, "data/other.npz") is None
    assert digest_within("data", "0" * 32 + ".dir", "data/train.npz") is None


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, ".dvc/cache"),
        ({".dvc/config": "[core]\n    analytics = false\n"}, ".dvc/cache"),
        ({".dvc/config": "[cache]\n    dir = ../shared\n"}, ".dvc/../shared"),
        ({".dvc/config": "[cache]\n    dir = a\n", ".dvc/config.local": "['remote \"x\"']\n[cache]\ndir = /b\n"}, "/b"),
        ({"../config/dvc/config": "[cache]\n    dir = /mine\n"}, "/mine"),
        ({".dvc/config": "no configuration\n"}, ".dvc/cache"),
    ],
)
def test_cache_follows_dvc_configuration(texts: dict[str, str], expected: str, project: Path) -> None:
    write(project, {name: text.encode() for name, text in texts.items()})
    dvc_cache._configured_cache.cache_clear()
    assert cache_folder() == project / expected


@pytest.mark.parametrize("system", [Unix, MacOS])
@pytest.mark.parametrize("level", ["DVC_SYSTEM_CONFIG_DIR", "DVC_GLOBAL_CONFIG_DIR", "XDG_CONFIG_HOME", "neither"])
def test_configuration_files_are_those_of_dvc(
    level: str, system: type, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platformdirs, "PlatformDirs", system)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv(level, str(tmp_path))
    of_dvc = Config(str(project / ".dvc"), validate=False).files
    read = [str(file) for file, _ in dvc_cache._configurations(project / ".dvc")]
    assert read == [of_dvc[name] for name in ("system", "global", "repo", "local")]


NAMES = ["a", "a.txt", "a-b", "B", "ü", "日本", "a b", "é"]


def dvc_digest(path: Path, odb: Path, ignore: DvcIgnoreFilter | None = None) -> str:
    database = HashFileDB(LocalFileSystem(), str(odb))
    _, _, built = build(database, str(path), LocalFileSystem(), "md5", dry_run=True, ignore=ignore)
    return str(built.hash_info.value)


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


def test_files_that_dvc_ignores_are_in_no_digest_and_no_stamps(project: Path, tmp_path: Path) -> None:
    folder = write(project / "folder", {"a.py": b"a"})
    before, stamps = digest(folder), stamps_of([folder])
    write(folder, {"__pycache__/a.pyc": b"b", ".DS_Store": b"c", "b/.DS_Store": b"d"})
    shutil.copy(ROOT / ".dvcignore", project)
    ignore = DvcIgnoreFilter(LocalFileSystem(), str(project))
    assert digest(folder) == dvc_digest(folder, tmp_path / "odb", ignore) == before
    assert stamps_of([folder]) == stamps
    assert digest(write(folder, {"b.py": b"b"})) == dvc_digest(folder, tmp_path / "odb", ignore) != before
