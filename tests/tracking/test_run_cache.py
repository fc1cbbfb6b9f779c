"""Locks are reconstructed from DVC's run-cache, by the digests of what was read and written."""

import os
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gradtrail.stages.common import dvc_cache
from gradtrail.stages.common.pipeline_file import StageSpec
from gradtrail.tracking import run_cache
from gradtrail.tracking.state import Snapshot

PIPELINE = {
    "fetch": StageSpec(cmd="run fetch", deps=("fetch.py",), params={}, outs=("data",)),
    "train": StageSpec(cmd="run train", deps=("data", "train.py"), params={}, outs=("model",)),
    "evaluate": StageSpec(cmd="run evaluate", deps=("data", "model"), params={}, outs=("words",)),
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    dvc_cache._configured_cache.cache_clear()
    monkeypatch.setattr(run_cache, "is_here", lambda *_: True)


def keep(
    stage: str, deps: dict[str, str], outs: dict[str, str], *, seconds: int, params: dict[str, Any] | None = None
) -> dict[str, Any]:
    section = {
        "cmd": f"run {stage}",
        "deps": [{"path": path, "md5": md5} for path, md5 in deps.items()],
        "outs": [{"path": path, "md5": md5} for path, md5 in outs.items()],
    }
    section |= {"params": params} if params else {}
    path = Path(".dvc/cache/runs/00/0") / f"{seconds:064d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    YAML().dump(section, path)
    os.utime(path, (seconds, seconds))
    return section


def found(*known_states: str) -> list[dict[str, Any]]:
    return locks_of(PIPELINE, {}, known_states)


def locks_of(pipeline: dict[str, StageSpec], lock: dict[str, Any], known: Container[str] = ()) -> list[dict[str, Any]]:
    snapshots = [Snapshot(pipeline=pipeline, lock=lock)]
    return [snapshot.lock for snapshot in run_cache.only_in_run_cache(snapshots, known.__contains__)]


def test_each_entry_has_the_stages_before_it() -> None:
    fetch = keep("fetch", {"fetch.py": "f"}, {"data": "d"}, seconds=1)
    train = keep("train", {"data": "d", "train.py": "t"}, {"model": "m"}, seconds=2)
    other = keep("train", {"data": "d", "train.py": "t2"}, {"model": "m2"}, seconds=3)
    evaluate = keep("evaluate", {"data": "d", "model": "m"}, {"words": "w"}, seconds=4)
    assert found() == [
        {"fetch": fetch},
        {"fetch": fetch, "train": train},
        {"fetch": fetch, "train": other},
        {"fetch": fetch, "train": train, "evaluate": evaluate},
    ]


def test_newest_fitting_entry_with_the_same_bytes_counts() -> None:
    keep("fetch", {"fetch.py": "f"}, {"data": "d"}, seconds=1)
    newest = keep("fetch", {"fetch.py": "f2"}, {"data": "d"}, seconds=3)
    keep("fetch", {"fetch.py": "f3"}, {"data": "d3"}, seconds=4)
    train = keep("train", {"data": "d", "train.py": "t"}, {"model": "m"}, seconds=2)
    keep("train", {"data": "d3", "train.py": "t"}, {"model": "m"}, seconds=5)  # of other data: not what was evaluated
    evaluate = keep("evaluate", {"data": "d", "model": "m"}, {"words": "w"}, seconds=6)
    assert found()[-1] == {"fetch": newest, "train": train, "evaluate": evaluate}


def test_a_profile_belongs_to_the_newest_training_of_its_params() -> None:
    """It is a child of a training although it reads none of its outs; without a training it is left out."""
    pipeline = PIPELINE | {
        "profile": StageSpec(cmd="run profile", deps=("data",), params={"params.yaml": ("train",)}, outs=("costs",))
    }
    params = [{"params.yaml": {"train": {"seed": seed}}} for seed in (1, 2)]
    fetch = keep("fetch", {"fetch.py": "f"}, {"data": "d"}, seconds=1)
    profile = keep("profile", {"data": "d"}, {"costs": "c"}, seconds=2, params=params[0])
    keep("train", {"data": "d", "train.py": "t"}, {"model": "m2"}, seconds=3, params=params[1])
    keep("train", {"data": "d2", "train.py": "t"}, {"model": "m3"}, seconds=4, params=params[0])
    locks = locks_of(pipeline, {})
    assert not [lock for lock in locks if "profile" in lock]
    keep("train", {"data": "d", "train.py": "t"}, {"model": "m"}, seconds=5, params=params[0])
    train = keep("train", {"data": "d", "train.py": "t2"}, {"model": "m"}, seconds=6, params=params[0])
    locks = locks_of(pipeline, {})
    assert {"fetch": fetch, "train": train, "profile": profile} in locks


def test_earlier_stages_may_be_only_in_a_lock() -> None:
    """As of stages that ran before DVC made entries for them."""
    fetch = keep("fetch", {"fetch.py": "f"}, {"data": "d"}, seconds=1)
    next(Path(".dvc/cache/runs").rglob("*1")).unlink()
    train = keep("train", {"data": "d", "train.py": "t"}, {"model": "m"}, seconds=2)
    assert locks_of(PIPELINE, {"fetch": fetch}) == [{"fetch": fetch, "train": train}]
