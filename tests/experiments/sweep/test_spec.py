"""Comparisons change params that exist to values that are allowed, and queue no more than what is missing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT

from gradtrail.cli import main
from gradtrail.core.train.optimizers import OptimizerKind
from gradtrail.core.train.schedules import ScheduleKind
from gradtrail.experiments.repro import SECTIONS
from gradtrail.experiments.sweep import spec
from gradtrail.experiments.sweep.main import compare
from gradtrail.experiments.sweep.spec import (
    Comparison,
    PlannedRun,
    params_of,
    queue_commands,
    read_comparisons,
    require_seeds,
)
from gradtrail.stages.common.params import read_yaml, validate
from gradtrail.support.errors import UserError

PARAMS = read_yaml(ROOT / "params.yaml")
CLIPPING = Comparison(
    about="", seeds=(0, 1), variants={"on": {"train.clip_norm": 1.0}, "off": {"train.clip_norm": None}}
)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", read_yaml(ROOT / "comparisons.yaml"))
def test_each_variant_can_be_run_and_is_unlike_the_others(name: str) -> None:
    comparison = spec.choose(name)
    variants = [params_of(PlannedRun(label, 0), comparison, PARAMS) for label in comparison.variants]
    for params in variants:
        for section, into in SECTIONS.items():
            validate(params[section], into, name)
    assert all(one not in variants[:place] for place, one in enumerate(variants))
    assert len(comparison.seeds) >= 3


def test_the_kinds_are_all_compared() -> None:
    found = read_comparisons()
    assert {*found["optimizers"].variants} == {*OptimizerKind.__args__}
    assert {*found["schedules"].variants} == {*ScheduleKind.__args__}


def test_only_what_is_missing_is_queued_one_line_a_variant() -> None:
    missing = [run for run in spec.wanted_runs(CLIPPING, (0, 1, 2)) if run != PlannedRun("on", 1)]
    lines = [(" ".join(command), runs) for command, runs in queue_commands(missing, CLIPPING)]
    queue = "dvc exp run --queue -S"
    assert lines == [
        (f"{queue} train.clip_norm=1.0 -S train.seed=0,2 evaluate", [PlannedRun("on", 0), PlannedRun("on", 2)]),
        (f"{queue} train.clip_norm=null -S train.seed=0,1,2 evaluate", [PlannedRun("off", seed) for seed in (0, 1, 2)]),
    ]


def test_an_unknown_comparison_is_told_which_there_are() -> None:
    with pytest.raises(UserError, match=r"^comparisons\.yaml: no comparison clip; there are precision, clipping, "):
        spec.choose("clip")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": []}, r"mine\.seeds: different whole numbers from 0"),
        ({"seeds": [0, 0]}, r"mine\.seeds: different whole numbers from 0"),
        ({"variants": {"one": {}}}, r"mine\.variants: at least two"),
        ({"variants": {"one": {}, "two": {"train.modle": 1}}}, r"mine\.variants\.two\.train\.modle is no key"),
        ({"variants": {"one": {}, "two": {"train.seed": 1}}}, r"two\.train\.seed: all variants have the same seeds"),
        ({"variants": {"one": {}, "two": {"runtime.trace": True}}}, r"two\.runtime\.trace changes no training"),
        ({"variants": {"one": {}, "two": None}}, r"mine\.variants\.two: Input should be an object, got None"),
        ({"abuot": ""}, r"mine\.abuot is no known key"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_place(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    content = {"mine": {"about": "", "seeds": [0], "variants": {"one": {}, "two": {}}} | change}
    path = tmp_path / "comparisons.yaml"
    path.write_text(str(content).replace("None", "null").replace("True", "true"))
    with pytest.raises(UserError, match=said) as fault:
        read_comparisons(path)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("seeds", [[], [1, 1], [-1, 0]])
def test_seeds_are_different_and_whole(seeds: list[int]) -> None:
    with pytest.raises(UserError, match=r"^--seeds: different whole numbers from 0"):
        require_seeds(seeds, "--seeds")
    assert require_seeds([3, 1], "--seeds") == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["clip"], "comparisons.yaml: no comparison clip; there are precision, "),
        (["clipping", "--seeds", "1,1"], "--seeds: different whole numbers from 0, such as 0,1,2; got 1, 1"),
        (["clipping", "--seeds", "one"], "--seeds: whole numbers with commas between them"),
        (["clipping", "--jobs", "0"], "--jobs: a whole number from 1; got 0"),
    ],
)
def test_on_the_command_line_a_mistake_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gradtrail", "compare", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gradtrail: {said}")


def test_without_git_it_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("params.yaml", "comparisons.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"need git and a first commit$"):
        compare("clipping", None, 1)
