"""A state's key changes with every ingredient, and is the same from live files and from `dvc.lock`."""

from pathlib import Path
from typing import Any

import pytest
from fuzzing import refusal

from gradtrail.stages.common.pipeline_file import (
    Entry,
    StageSpec,
    dvc_target,
    live_entry,
    locked_entry,
    read_locks,
    read_pipeline,
    read_pipelines,
    upstream_stages,
)
from gradtrail.tracking.state import state_key

PIPELINE_FILE = """
stages:
  make:
    cmd: make it
    deps: [code.py]
    params:
      - make
      - pipeline/versions.yaml:
          - numpy
    outs: [data]
    metrics:
      - results/metrics/make.json:
          cache: false
  use:
    cmd: use it
    deps: [data/part.txt, code.py]
    params: [use.rate]
    outs:
      - results:
          persist: true
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "dvc.yaml": PIPELINE_FILE,
        "params.yaml": "make: {size: 3}\nuse: {rate: 1e-3, other: 1}\n",
        "pipeline/versions.yaml": 'numpy: "2.0"\njax: "0.1"\n',
        "code.py": "pass\n",
        "data/part.txt": "part\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def key_of(stage: str, folder: Path) -> str:
    pipeline = read_pipeline(folder / "dvc.yaml")
    return state_key(stage, live_entry(pipeline[stage], folder))


def test_pipeline_file_is_read_with_all_its_forms(folder: Path) -> None:
    assert read_pipeline(folder / "dvc.yaml") == {
        "make": StageSpec(
            cmd="make it",
            deps=("code.py",),
            params={"params.yaml": ("make",), "pipeline/versions.yaml": ("numpy",)},
            outs=("data", "results/metrics/make.json"),
        ),
        "use": StageSpec(
            cmd="use it", deps=("data/part.txt", "code.py"), params={"params.yaml": ("use.rate",)}, outs=("results",)
        ),
    }


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("dvc.yaml", "use it", "use it well", {"use"}),
        ("dvc.yaml", "make it", "make it well", {"make"}),
        ("params.yaml", "1e-3", "2e-3", {"use"}),
        ("params.yaml", "size: 3", "size: 4", {"make"}),
        ("params.yaml", "other: 1", "other: 2", set()),
        ("pipeline/versions.yaml", '"2.0"', '"2.1"', {"make"}),
        ("pipeline/versions.yaml", '"0.1"', '"0.2"', set()),
        ("data/part.txt", "part", "other part", {"use"}),
        ("code.py", "pass", "...", {"make", "use"}),
        ("dvc.yaml", "deps: [data/part.txt, code.py]", "deps: [code.py, data/part.txt]", set()),
    ],
)
def test_key_changes_with_each_ingredient_and_with_nothing_else(
    file: str, old: str, new: str, changed: set[str], folder: Path
) -> None:
    before = {stage: key_of(stage, folder) for stage in ("make", "use")}
    content = (folder / file).read_text()
    assert content.count(old) == 1
    (folder / file).write_text(content.replace(old, new))
    assert {stage for stage in before if key_of(stage, folder) != before[stage]} == changed


def locked(entry: Entry) -> dict[str, Any]:
    """Write an entry as DVC does, the deps sorted by path."""
    deps = [{"path": path, "hash": "md5", "md5": md5, "size": 1} for path, md5 in sorted(entry.deps.items())]
    return {"cmd": entry.cmd, "deps": deps, "params": entry.params, "outs": [{"path": "results", "md5": "0"}]}


def test_key_is_the_same_from_a_lock_and_from_files(folder: Path) -> None:
    pipeline = read_pipeline(folder / "dvc.yaml")
    lock = {name: locked(live_entry(spec, folder)) for name, spec in pipeline.items()}
    assert state_key("use", locked_entry(lock["use"])) == key_of("use", folder)


def test_upstream_stages_match_files_and_folders_but_no_prefix() -> None:
    specs = {
        "folder": StageSpec(cmd="", deps=(), params={}, outs=("data",)),
        "file": StageSpec(cmd="", deps=(), params={}, outs=("models/best",)),
        "other": StageSpec(cmd="", deps=(), params={}, outs=("dat", "models/bes")),
        "use": StageSpec(cmd="", deps=("models/best", "data/part"), params={}, outs=("use",)),
    }
    assert upstream_stages("use", specs) == ["folder", "file"]
    assert upstream_stages("folder", specs) == []


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("dvc.yaml", "plots: []\n"),
        ("dvc.yaml", "stages: [make]\n"),
        ("dvc.yaml", "stages: {make: {deps: [a]}}\n"),
        ("dvc.lock", "stages: [make]\n"),
        ("dvc.lock", "stages: {make: {cmd: it, deps: [{path: code.py}]}}\n"),
    ],
)
def test_file_without_stages_is_refused_in_one_line(file: str, content: str, folder: Path) -> None:
    (folder / file).write_text(content)
    line = refusal(lambda: read_pipeline(folder / file) if file == "dvc.yaml" else read_locks(folder)) or ""
    assert line.startswith(f"{folder / file}: no stages as DVC ")


def test_optional_pipeline_is_read_with_the_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_pipelines(folder) == read_pipeline(folder / "dvc.yaml")
    (folder / "pipeline" / "audit").mkdir(parents=True)
    (folder / "pipeline" / "audit" / "dvc.yaml").write_text(
        "stages: {look: {wdir: ../.., cmd: look, deps: [data], outs: [seen]}}"
    )
    (folder / "pipeline" / "audit" / "dvc.lock").write_text("schema: '2.0'\nstages: {look: {cmd: look}}")
    assert list(read_pipelines(folder)) == [*read_pipeline(folder / "dvc.yaml"), "look"]
    assert "look" in read_locks(folder)
    assert upstream_stages("look", read_pipelines(folder)) == ["make"]
    monkeypatch.chdir(folder)
    assert (dvc_target("look"), dvc_target("make")) == ("pipeline/audit/dvc.yaml:look", "make")
