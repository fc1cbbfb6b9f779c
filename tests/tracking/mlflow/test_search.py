"""Which run stands for a state: its own, or one of other code that wrote the same bytes from the same params."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.entities import Param, Run, RunData, RunInfo, RunTag

from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.pipeline_file import StageSpec
from gradtrail.support.errors import UserError
from gradtrail.tracking.lineage.snapshots import Snapshot
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.lookup import runs as lookup
from gradtrail.tracking.mlflow.search import find_equivalent_run

OUTS = {"models/export": "e" * 32, "results/metrics/export.json": "1" * 32}
PIPELINE = {
    "evaluate": StageSpec(
        cmd="run evaluate", deps=("code.py",), params={"params.yaml": ("evaluate",)}, outs=("results/evaluate",)
    ),
    "export": StageSpec(
        cmd="run export",
        deps=("code.py", "results/evaluate"),
        params={"params.yaml": ("export",)},
        outs=tuple(OUTS),
    ),
}
PARAMS = {"evaluate.bins": "15", "export.format": "onnx"}


def state(*, code: str = "new", bins: int = 15, evaluated: str = "a") -> Identity:
    """The export of a lock that names this code, evaluation and number of bins."""

    def section(stage: str, params: dict[str, Any], deps: dict[str, str], outs: Mapping[str, str]) -> dict[str, Any]:
        return {
            "cmd": f"run {stage}",
            "params": {"params.yaml": {stage: params}},
            "deps": [{"path": path, "md5": md5} for path, md5 in deps.items()],
            "outs": [{"path": path, "md5": md5} for path, md5 in outs.items()],
        }

    lock = {
        "evaluate": section("evaluate", {"bins": bins}, {"code.py": code}, {"results/evaluate": evaluated}),
        "export": section("export", {"format": "onnx"}, {"code.py": code, "results/evaluate": evaluated}, OUTS),
    }
    return Identity("export", from_lock=True, snapshot=Snapshot(pipeline=PIPELINE, lock=lock))


def run_of(stage: Identity, params: Mapping[str, str], outs: Mapping[str, str] = OUTS) -> Run:
    info = RunInfo(
        run_id="r", experiment_id="1", user_id="", status="FINISHED", start_time=1, end_time=2, lifecycle_stage="active"
    )
    tags = {"stage": stage.name, "state": stage.state, "outs": json.dumps(dict(outs))}
    return Run(
        info,
        RunData(
            params=[Param(key, value) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        ),
    )


def is_found(stage: Identity, run: Run) -> bool:
    def find(tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        return [run] if tags.items() <= run.data.tags.items() else []

    return find_equivalent_run(find, stage) is run


def test_run_represents_its_own_state() -> None:
    assert is_found(state(), run_of(state(), PARAMS))
    assert not is_found(state(), run_of(state(), PARAMS, {"models/export": "f" * 32})), "it has another result"


def test_run_of_other_code_represents_a_state_with_the_same_result() -> None:
    before = run_of(state(code="old"), PARAMS, OUTS | {"results/metrics/export.json": "2" * 32})
    assert is_found(state(), before), "edits of code may change which metrics there are"
    assert not is_found(state(), run_of(state(code="old"), PARAMS, OUTS | {"models/export": "f" * 32}))
    assert not is_found(state(), run_of(state(code="old"), PARAMS | {"export.format": "safetensors"}))


@pytest.mark.parametrize(("params", "expected"), [({"evaluate.bins": "7"}, False), ({}, True)])
def test_params_of_the_stages_before_make_another_result(params: dict[str, str], expected: bool) -> None:
    """Metrics may come of them, if all other outs are the same. A param that only one of the two has does not count."""
    other = run_of(state(bins=7, evaluated="b"), {"export.format": "onnx"} | params)
    assert is_found(state(), other) == expected


LOCK = "state-of-the-lock"


def run(name: str, state: str, outs: dict[str, str]) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(run_id=name),
        data=SimpleNamespace(tags={"state": state, "outs": json.dumps(outs)}),
    )


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`models/final.safetensors` of a repository whose lock has one state."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "models").mkdir()
    path = tmp_path / "models/final.safetensors"
    path.write_text("weights")
    monkeypatch.setattr(lookup, "working_snapshot", lambda: "a lock")
    monkeypatch.setattr(lookup, "consistent_stages", lambda _: [SimpleNamespace(state=LOCK)])
    return path


def keep(folder: Path, files: dict[str, str]) -> str:
    """Put the listing of a folder into the cache; return its digest."""
    md5 = "12" * 16 + ".dir"
    path = folder / f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([{"relpath": name, "md5": item} for name, item in files.items()]))
    return md5


def test_bytes_that_a_run_wrote_to_several_paths_were_written_to_each(weights: Path, tmp_path: Path) -> None:
    md5 = digest(weights)
    epochs = keep(tmp_path, {"002.safetensors": md5})
    outs = {"models/epochs": epochs, "models/final.safetensors": md5}
    both = [run("newer", "another", outs), run("older", LOCK, outs)]
    assert [item.info.run_id for item in lookup.writers(weights, both)] == ["older"]
    assert [item.info.run_id for item in lookup.writers(weights, both[:1])] == ["newer"]


def test_runs_that_wrote_the_bytes_to_another_path_count_if_none_wrote_this_path(weights: Path, tmp_path: Path) -> None:
    epochs = keep(tmp_path, {"002.safetensors": digest(weights)})
    elsewhere = [run("one", "another", {"models/epochs": epochs})]
    in_place = run("two", "a third", {"models/final.safetensors": digest(weights)})
    assert [item.info.run_id for item in lookup.writers(weights, elsewhere)] == ["one"]
    assert [item.info.run_id for item in lookup.writers(weights, [*elsewhere, in_place])] == ["two"]


def test_bytes_of_no_run_are_an_error_of_one_line(weights: Path) -> None:
    with pytest.raises(UserError, match="no run wrote these bytes"):
        lookup.writers(weights, [run("one", LOCK, {"models/final.safetensors": "0" * 32})])
