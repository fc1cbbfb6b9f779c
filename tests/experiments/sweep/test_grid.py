"""The file of a sweep: which experiments it stands for, and what is wrong with it in one line."""

from pathlib import Path

import pytest
from factories import ROOT

from gradtrail.experiments.sweep.grid import read_sweep
from gradtrail.stages.common.overrides import MEMBERS, SEED
from gradtrail.support.errors import UserError

RATE = "train.adamw.learning_rate"


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def written(folder: Path, text: str) -> Path:
    path = folder / "rates.yaml"
    path.write_text(text)
    return path


def test_grid_is_every_combination_followed_by_the_points(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
about: which rate?
set: {{train.epochs: 1}}
grid: {{{RATE}: [1e-3, 3e-3], {SEED}: [4, 5]}}
points:
  - {{train.model: cnn}}
""",
    )
    comparison, planned = read_sweep(path)
    assert [str(run) for run in planned] == [
        "learning_rate=0.001, seed 4",
        "learning_rate=0.001, seed 5",
        "learning_rate=0.003, seed 4",
        "learning_rate=0.003, seed 5",
        "model=cnn, seed 0",
    ]
    assert comparison.variants == {
        "learning_rate=0.001": {"train.epochs": 1, RATE: 0.001},
        "learning_rate=0.003": {"train.epochs": 1, RATE: 0.003},
        "model=cnn": {"train.epochs": 1, "train.model": "cnn"},
    }
    assert comparison.timed, "each experiment trains one seed"


def test_keys_with_the_same_last_part_are_labelled_in_full(tmp_path: Path) -> None:
    one, other = "train.mlp.activation", "train.cnn.activation"
    text = f"""
points:
  - {{{one}: tanh}}
  - {{{other}: tanh, train.epochs: 2}}
  - {{train.epochs: 2}}
  - {{{one}: tanh, {SEED}: 1}}
"""
    comparison, planned = read_sweep(written(tmp_path, text))
    labels = [f"{one}=tanh", f"{other}=tanh, epochs=2", "epochs=2"]
    assert list(comparison.variants) == labels
    assert [str(run) for run in planned] == [*(f"{label}, seed 0" for label in labels), f"{labels[0]}, seed 1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about: nothing", r"no experiments; `grid` and `points` must have 1 to 10,000"),
        ("grid: {train.seed: []}", r"grid\.train\.seed: has no values"),
        ("grid: {train.sed: [1]}", r"grid\.train\.sed is not a key of params\.yaml; did you mean 'train\.seed'\?"),
        ("points: [{train.model: cnn}, {colour: red}]", r"points\.1\.colour is not a key of params\.yaml"),
        ("set: {train.seed: 1}\ngrid: {train.model: [cnn]}", r"set\.train\.seed: each experiment trains one seed"),
        (
            f"grid: {{{MEMBERS}: [1, 2]}}",
            r"grid\.train\.members: each experiment trains one seed; list seeds in `grid`",
        ),
        ("grid: {gradients.num_largest: [1]}", r"grid\.gradients\.num_largest changes neither training nor evaluation"),
        ("grid: {train.seed: [-1]}", r"train\.seed: must be distinct integers from 0 to"),
        ("grid: {train.seed: [0, b]}", r"train\.seed: must be distinct integers from 0 to .*; got b$"),
        ("points: [{train.seed: true}]", r"train\.seed: must be distinct integers from 0 to .*; got True$"),
        ("grids: {}", r"rates\.yaml\.grids is not a known key$"),
        (
            "grid: {train.seed: [%s], train.epochs: [%s]}" % ((", ".join(map(str, range(1, 150))),) * 2),
            r"more than 10,000 experiments",
        ),
    ],
)
def test_invalid_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_sweep(written(tmp_path, text))
    assert "\n" not in str(caught.value)
