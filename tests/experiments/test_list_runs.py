"""`gradtrail runs`: which rows it shows, in which order, and what it says of each."""

import io
from pathlib import Path

import pytest
from mlflow.entities import Metric, Param, Run, RunData, RunInfo, RunTag
from rich.console import Console

from gradtrail.experiments import list_runs
from gradtrail.experiments.list_runs import fitting_table, in_order, print_runs
from gradtrail.stages.common.params import read_yaml
from gradtrail.support.errors import UserError


def row(number: int, accuracy: float | None, *, status: str = "FINISHED", **params: str) -> Run:
    """Return a training's row; in names of params a double underscore stands for a dot."""
    figures = {"train/seconds": float(number)} | ({"eval/accuracy": accuracy} if accuracy is not None else {})
    if accuracy is not None:
        figures |= {"eval/accuracy_low": accuracy - 0.01, "eval/accuracy_high": accuracy + 0.01}
    info = RunInfo(
        run_id=f"{number:032x}"[::-1],
        experiment_id="1",
        user_id="",
        status=status,
        start_time=number,
        end_time=number,
        lifecycle_stage="active",
        run_name="train mlp-8 adamw float32",
    )
    data = RunData(
        metrics=[Metric(name, value, 0, 0) for name, value in figures.items()],
        params=[Param(name.replace("__", "."), value) for name, value in params.items()],
        tags=[RunTag("stage", "train"), RunTag("dataset", "digits")],
    )
    return Run(info, data)


MLP = {"train__model": "mlp", "train__mlp__hidden": "[8]", "train__cnn__hidden": "[4]", "train__epochs": "3"}
ROWS = [
    row(1, 0.91, **MLP, train__seed="0"),
    row(2, 0.93, **MLP, train__seed="1"),
    row(3, None, status="KILLED", **MLP, train__seed="10"),
    row(4, 0.92, **(MLP | {"train__model": "cnn", "train__mlp__hidden": "[16]"}), train__seed="2"),
]


def ids(rows: list[Run]) -> list[str]:
    return [one.info.run_id[:1] for one in rows]


def printed(rows: list[Run], width: int = 200) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(fitting_table(rows, 9, console))
    return [line.strip() for line in console.export_text().splitlines()]


def test_the_order_is_of_numbers_and_what_lacks_the_key_is_last() -> None:
    assert ids(in_order(ROWS, "eval/accuracy", ascending=False)) == ["2", "4", "1", "3"]
    assert ids(in_order(ROWS, "eval/accuracy", ascending=True)) == ["1", "4", "2", "3"]
    assert ids(in_order(ROWS, "train.seed", ascending=True)) == ["1", "2", "4", "3"]
    assert ids(in_order(ROWS, "train.model", ascending=True)) == ["4", "1", "2", "3"]
    with pytest.raises(UserError, match=r"no row has 'accurac'.* eval/accuracy"):
        in_order(ROWS, "accurac", ascending=True)


def test_it_shows_what_differs_and_marks_the_best() -> None:
    lines = printed(ROWS[:2])
    assert "2 of 9 trainings" in lines[0]
    assert "seed" in lines[2]
    assert "epochs" not in lines[2], "the same in all"
    (best,) = (line for line in lines if "* " in line)
    assert best.startswith(ROWS[1].info.run_id[:8])
    assert "* 93.00 (92.00–94.00)" in best
    assert "status" not in lines[2]


def test_where_there_is_little_room_no_number_is_cut_off() -> None:
    assert "train, s" in printed(ROWS[:2])[2]
    narrow = printed(ROWS[:2], width=70)
    assert "train, s" not in narrow[2]
    assert any("* 93.00 (92.00–94.00)" in line for line in narrow)


def test_a_param_of_a_kind_counts_only_for_rows_of_that_kind() -> None:
    lines = printed(ROWS)
    assert "model" in lines[2]
    assert "hidden" not in lines[2], "only one row is a CNN, and all others have the same MLP"
    assert "status" in lines[2]


def test_the_kinds_are_all_blocks_of_train_that_a_switch_chooses_among() -> None:
    train = read_yaml(Path(__file__).resolve().parents[2] / "params.yaml")["train"]
    blocks = {name for name, value in train.items() if isinstance(value, dict)}
    assert blocks - {"augmentation", "loss_scaling"} <= list_runs._KINDS


def test_rows_are_filtered_and_limited(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(list_runs, "open_store", lambda: None)
    monkeypatch.setattr(list_runs, "RowIndex", lambda _: lambda _: ROWS)
    options = {"sort_by": "eval/accuracy", "ascending": False}
    print_runs(where={"train.model": "mlp", "dataset": "digits"}, limit=2, **options)
    out = capsys.readouterr().out
    assert "2 of 3 trainings" in out
    assert [ROWS[number].info.run_id[:8] in out for number in range(4)] == [True, True, False, False]
    with pytest.raises(UserError, match=r"none of 4 trainings has train.model=tree; train.model is cnn or mlp"):
        print_runs(where={"train.model": "tree"}, limit=None, **options)
    monkeypatch.setattr(list_runs, "RowIndex", lambda _: lambda _: [])
    print_runs(where={}, limit=None, **options)
    assert "no training yet" in capsys.readouterr().out
