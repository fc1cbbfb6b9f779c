"""When `gradtrail repro` may leave `dvc repro` out: never if DVC's own status has a change."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo
from ruamel.yaml import YAML

from gradtrail.experiments.up_to_date import is_up_to_date, pipeline_stamp, remember
from gradtrail.stages.common.files import digest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # DVC's own

PIPELINE: dict[str, Any] = {
    "stages": {
        "first": {
            "cmd": "mkdir -p made/sub nothing; cp read.txt made/sub",
            "deps": ["read.txt", "code"],
            "params": ["value"],
            "outs": ["made", "nothing"],
        },
        "second": {
            "cmd": "echo last > last.txt; echo '{}' > metrics.json",
            "deps": ["made"],
            "outs": ["last.txt"],
            "metrics": [{"metrics.json": {"cache": False}}],
        },
    }
}


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which `dvc repro` has run, and has nothing more to do."""
    folder = tmp_path_factory.mktemp("repository")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Repo.init(no_scm=True).close()
        for name, text in {"read.txt": "content", "code/a.py": "1\n", "params.yaml": "value: 1\nother: 2\n"}.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        YAML().dump(PIPELINE, Path("dvc.yaml"))
        with Repo() as repo:
            repo.reproduce()
        assert not changes()
    return folder


@pytest.fixture
def repository(reproduced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a copy of the repository."""
    folder = shutil.copytree(reproduced, tmp_path / "repository")
    monkeypatch.chdir(folder)
    return folder


def changes() -> dict[str, Any]:
    with Repo() as repo:
        return dict(repo.status())


def cached(name: str) -> Path:
    """Return the file in the cache that has the content of an output."""
    md5 = digest(Path(name))
    return Path(".dvc/cache/files/md5", md5[:2], md5[2:])


def edit(name: str, old: str, new: str) -> None:
    Path(name).write_text(Path(name).read_text().replace(old, new))


def corrupt_cache() -> None:
    cached("made/sub/read.txt").chmod(0o644)
    cached("made/sub/read.txt").write_text("CONTENT")


def move_cache() -> None:
    Path(".dvc/config.local").write_text("[cache]\n    dir = elsewhere\n")


CHANGES: dict[str, Callable[[], object]] = {
    "dep": lambda: Path("read.txt").write_text("CONTENT"),
    "file in a dep": lambda: Path("code/a.py").write_text("2\n"),
    "new file in a dep": lambda: Path("code/b.py").touch(),
    "removed dep": lambda: Path("read.txt").unlink(),
    "ignored file of a dep": lambda: Path(".dvcignore").write_text("a.py\n"),
    "param": lambda: edit("params.yaml", "value: 1", "value: 3"),
    "command": lambda: edit("dvc.yaml", "cp read.txt", "cp -p read.txt"),
    "lock": lambda: Path("dvc.lock").unlink(),
    "edited output": lambda: Path("last.txt").write_text("CONTENT"),
    "removed output": lambda: Path("last.txt").unlink(),
    "removed empty folder": lambda: Path("nothing").rmdir(),
    "removed metrics": lambda: Path("metrics.json").unlink(),
    "removed from the cache": lambda: cached("last.txt").unlink(),
    "removed from the cache, in a folder": lambda: cached("made/sub/read.txt").unlink(),
    "removed from the cache, a folder": lambda: cached("made").unlink(),
    "corrupt cache": corrupt_cache,
    "another cache": move_cache,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_change_that_dvc_finds_is_missed(change: Callable[[], object], repository: Path) -> None:
    remember(pipeline_stamp())
    assert is_up_to_date(pipeline_stamp())
    change()
    assert not is_up_to_date(pipeline_stamp())
    assert changes(), "DVC runs nothing: the test would pass without a change"


def test_edit_that_keeps_size_and_time_is_not_missed(repository: Path) -> None:
    remember(pipeline_stamp())
    times = Path("read.txt").stat()
    Path("read.txt").write_text("CONTENT")
    os.utime("read.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not is_up_to_date(pipeline_stamp())


def test_files_that_change_without_a_stage_have_no_stamp(repository: Path) -> None:
    remember(pipeline_stamp())
    for name in ("mlflow.db", "mlflow.db-wal", ".mlflow.db.lock", "mlruns/1/a.txt", ".gradtrail/x", ".venv/a.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert is_up_to_date(pipeline_stamp())


def test_dvc_that_changed_something_is_not_remembered(repository: Path) -> None:
    stamp = pipeline_stamp()
    Path("read.txt").write_text("CONTENT")
    with Repo() as repo:
        repo.reproduce()
    remember(stamp)
    assert not is_up_to_date(stamp)
    assert not is_up_to_date(pipeline_stamp())
    assert not is_up_to_date("")


FIRST = PIPELINE["stages"]["first"]
OPEN_STAGES: dict[str, dict[str, Any]] = {  # stages whose changes have no stamp
    "always": {"always_changed": True},
    "frozen": {"frozen": True},
    "no deps": {"deps": []},
    "above": {"deps": ["code/../../read.txt"]},
    "absolute": {"deps": ["/etc/hostname"]},
    "address": {"deps": ["s3://bucket/key"]},
    "template": {"deps": ["${other}"]},
    "hidden": {"deps": [".venv/pyvenv.cfg"]},
    "of MLflow": {"deps": ["mlruns/1"]},
    "database": {"outs": ["mlflow.db"]},
    "with a filesystem": {"deps": [{"read.txt": {"fs": {}}}]},
    "params elsewhere": {"params": [{"../params.yaml": ["value"]}]},
    "folder": {"wdir": "code"},
    "loop": {"foreach": [1], "do": FIRST},
}


@pytest.mark.parametrize("change", OPEN_STAGES.values(), ids=OPEN_STAGES)
def test_pipeline_that_depends_on_more_than_stamped_files_is_not_remembered(
    change: dict[str, Any], repository: Path
) -> None:
    YAML().dump({"stages": PIPELINE["stages"] | {"first": FIRST | change}}, Path("dvc.yaml"))
    remember(pipeline_stamp())
    assert not is_up_to_date(pipeline_stamp())


@pytest.mark.parametrize("name", ["code/dvc.yaml", "read.txt.dvc", "linked", "dvc.yaml"])
def test_other_pipelines_and_linked_folders_are_not_remembered(name: str, repository: Path) -> None:
    if name == "linked":
        Path(name).symlink_to(repository.parent)
    elif name == "dvc.yaml":
        YAML().dump(PIPELINE | {"vars": [{"cmd": "true"}]}, Path(name))
    else:
        Path(name).write_text("stages: {}\n")
    remember(pipeline_stamp())
    assert not is_up_to_date(pipeline_stamp())


def test_pipeline_of_this_project_is_remembered(repository: Path) -> None:
    root = Path(__file__).parents[2]
    for name in ("dvc.yaml", "pipeline/audit/dvc.yaml", "pipeline/privacy_audit/dvc.yaml", "pipeline/what_if/dvc.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, name)
    remember(pipeline_stamp())
    assert is_up_to_date(pipeline_stamp())
