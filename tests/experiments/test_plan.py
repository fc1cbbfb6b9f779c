"""`gradtrail plan`: its statuses are those of `dvc repro`, its seconds those of earlier runs; errors are one line."""

import contextlib
import re
from pathlib import Path

import pytest
from factories import ROOT
from small_project import finished_small_project

from gradtrail.core.config import ConfigError
from gradtrail.experiments.plan import CACHED, TO_BE_MADE, UP_TO_DATE, override, plan_stages, require_network
from gradtrail.stages.common.params import PARAMS, changed
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError
from gradtrail.tracking.state import PlannedStages


def test_statuses_are_what_dvc_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = finished_small_project().copy(tmp_path / "project")
    monkeypatch.chdir(project.folder)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    rate, bins = "train.adamw.learning_rate", "evaluate.calibration_bins"
    first = {key: project.get(key) for key in (rate, bins)}
    below = ("train", "evaluate", "gradients")
    steps: list[tuple[dict[str, object], dict[str, str]]] = [
        ({rate: 0.25}, dict.fromkeys(below, TO_BE_MADE)),
        ({bins: first[bins] + 1}, {"evaluate": TO_BE_MADE}),
        (first, dict.fromkeys(below, CACHED)),
        ({}, {"train": CACHED, "evaluate": TO_BE_MADE, "gradients": TO_BE_MADE}),  # an output is lost, code is edited
        ({}, {}),
    ]
    for changes, expected in steps:
        if not changes and expected:
            (project.folder / "models/final.safetensors").unlink()
            (project.folder / "src/gradtrail/core/third.py").write_text("WORD = 'new'\n")
        stages = PlannedStages()
        planned = {one.stage: one.status for one in plan_stages(stages, changed(stages.params, changes))}
        assert {stage: status for stage, status in planned.items() if status != UP_TO_DATE} == expected
        project.change(changes)
        output = project.dvc("repro") if expected else ""
        assert project.ran(output) == [stage for stage, status in planned.items() if status == TO_BE_MADE]
        restored = [stage for stage in planned if f"Stage '{stage}' is cached" in output]
        assert restored == [stage for stage, status in planned.items() if status == CACHED]


def test_seconds_are_those_of_the_most_similar_run_and_unknown_ones_are_not_added(tmp_path: Path) -> None:
    project = finished_small_project().copy(tmp_path / "project")
    same = project.gradtrail("plan", "-S", "evaluate.calibration_bins=7")
    assert re.search(r"evaluate +to be made +\d", same), same
    assert re.search(r"evaluate.*: time of the most similar run, with evaluate.calibration_bins \d+", same)
    assert re.search(r"in total about \d+(\.\d+)? s", same)
    other = project.gradtrail("plan", "-S", "train.model=linear", "evaluate")
    assert re.search(r"train +to be made +unknown", other), "the time of another model says nothing"
    project.gradtrail("plan", "--check")
    project.empty_store()
    unknown = project.gradtrail("plan", "--check", "-S", "evaluate.calibration_bins=7", status=1)
    assert re.search(r"evaluate +to be made +unknown", unknown), unknown
    assert "evaluate: time unknown without a run of this model and data on this kind of machine" in unknown
    assert "in total" not in unknown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.epoch=3", "did you mean 'train.epochs'?"),
        ("train.epochs", "must be KEY=VALUE"),
        ("train.epochs=ten", "train.epochs: Input should be a valid integer"),
        ("train.model=ccn", "train.model"),
        ("train.mlp.hidden=[512", "no viable alternative at input '[512'; a text with special characters needs quotes"),
        ("train.epochs=1,2", "must be one value"),
    ],
)
def test_errors_are_one_line(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"-S") as error:
        override(read_yaml(PARAMS), [text])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_option_is_read_as_dvc_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    params = override(read_yaml(PARAMS), ["report.title='a, b'", "train.clip_norm=1e1", "train.average_decay=NULL"])
    assert params["report"]["title"] == "a, b"
    assert (params["train"]["clip_norm"], params["train"]["average_decay"]) == (10.0, None)


def test_error_in_a_block_of_the_file_is_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    params = read_yaml(PARAMS)
    params["train"]["own"]["patchh"] = 7
    with pytest.raises(UserError) as error:
        override(params, ["train.model=own"])
    line = "params.yaml: train.own.patchh is not a known key; did you mean 'patch'?; -S set train.model=own"
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"train.own.width": 65}, r"transformer\.py:\d+: build fails: .*must be divisible"),
        ({"fetch.dataset": "cifar10"}, r"transformer\.py:\d+: the network on images of shape \(2, 32, 32, 3\) fails"),
        ({"fetch.dataset": "folder", "fetch.pictures.size": [30, 30]}, r"on images of shape \(2, 30, 30, 3\) fails"),
        ({"fetch.dataset": "folder", "fetch.pictures.size": [35, 35], "fetch.pictures.color": False}, ""),
        ({"fetch.dataset": "idx", "train.own.width": 65}, ""),
    ],
)
def test_network_is_built_before_its_data_are_here(
    changes: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    params = changed(read_yaml(PARAMS), {"train.model": "own", **changes})
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        require_network(params)
