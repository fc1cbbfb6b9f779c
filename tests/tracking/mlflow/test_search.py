"""Which run stands for a state: its own, or one of other code that wrote the same bytes from the same params."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from mlflow.entities import Param, Run, RunData, RunInfo, RunTag

from gradtrail.stages.common.pipeline_file import StageSpec
from gradtrail.tracking.lineage.snapshots import Snapshot
from gradtrail.tracking.lineage.state import Identity
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
