"""`gradtrail runs`: which runs it lists, in which order, with which columns."""

import io

import pytest
from factories import NETWORKS, OPTIMIZERS, ROOT, SCHEDULES
from mlflow.entities import Metric, Param, Run, RunData, RunInfo, RunTag
from rich.console import Console

from gradtrail.experiments import list_runs
from gradtrail.experiments.list_runs import fitting_table, print_runs, sorted_runs
from gradtrail.stages.common.params import SHARED_BLOCKS, read_yaml
from gradtrail.support.errors import UserError


def run(number: int, accuracy: float | None, *, status: str = "FINISHED", **params: str) -> Run:
    """Return a training's run; in names of params a double underscore stands for a dot."""
    metrics = {"train/seconds": float(number)} | ({"eval/accuracy": accuracy} if accuracy is not None else {})
    if accuracy is not None:
        metrics |= {"eval/accuracy_low": accuracy - 0.01, "eval/accuracy_high": accuracy + 0.01}
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
        metrics=[Metric(name, value, 0, 0) for name, value in metrics.items()],
        params=[Param(name.replace("__", "."), value) for name, value in params.items()],
        tags=[RunTag("stage", "train"), RunTag("dataset", "digits")],
    )
    return Run(info, data)


MLP = {"train__model": "mlp", "train__mlp__hidden": "[8]", "train__cnn__hidden": "[4]", "train__epochs": "3"}
RUNS = [
    run(1, 0.91, **MLP, train__seed="0"),
    run(2, 0.93, **MLP, train__seed="1"),
    run(3, None, status="KILLED", **MLP, train__seed="10"),
    run(4, 0.92, **(MLP | {"train__model": "cnn", "train__mlp__hidden": "[16]"}), train__seed="2"),
]


def ids(runs: list[Run]) -> list[str]:
    return [one.info.run_id[:1] for one in runs]


def printed(runs: list[Run], width: int = 200) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(fitting_table(runs, 9, console))
    return [line.strip() for line in console.export_text().splitlines()]


def test_order_is_numeric_and_runs_without_the_key_are_last() -> None:
    assert ids(sorted_runs(RUNS, "eval/accuracy", ascending=False)) == ["2", "4", "1", "3"]
    assert ids(sorted_runs(RUNS, "eval/accuracy", ascending=True)) == ["1", "4", "2", "3"]
    assert ids(sorted_runs(RUNS, "train.seed", ascending=True)) == ["1", "2", "4", "3"]
    assert ids(sorted_runs(RUNS, "train.model", ascending=True)) == ["4", "1", "2", "3"]
    with pytest.raises(UserError, match=r"no run has 'accurac'.* eval/accuracy"):
        sorted_runs(RUNS, "accurac", ascending=True)


def test_table_has_differing_params_and_metrics_that_fit() -> None:
    lines = printed(RUNS[:2])
    assert "2 of 9 training runs" in lines[0]
    assert "seed" in lines[2]
    assert "epochs" not in lines[2], "the same in all"
    (best,) = (line for line in lines if "* " in line)
    assert best.startswith(RUNS[1].info.run_id[:8])
    assert "* 93.00 (92.00–94.00)" in best
    assert "status" not in lines[2]
    assert "train, s" in printed(RUNS[:2])[2]
    narrow = printed(RUNS[:2], width=70)
    assert "train, s" not in narrow[2]
    assert any("* 93.00 (92.00–94.00)" in line for line in narrow)
    lines = printed(RUNS)
    assert "model" in lines[2]
    assert "hidden" not in lines[2], "only one run is a CNN, and all others have the same MLP"
    assert "status" in lines[2]


def test_blocks_of_train_are_kinds_or_shared() -> None:
    train = read_yaml(ROOT / "params.yaml")["train"]
    blocks = {name for name, value in train.items() if isinstance(value, dict)}
    kinds = {*NETWORKS, *OPTIMIZERS, *SCHEDULES}
    assert blocks - kinds == {*SHARED_BLOCKS, "loss_scaling", "privacy"}


def test_runs_are_filtered_and_limited(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(list_runs, "open_store", lambda: None)
    monkeypatch.setattr(list_runs, "RunIndex", lambda _: lambda _: RUNS)
    options = {"sort_by": "eval/accuracy", "ascending": False}
    print_runs(where={"train.model": "mlp", "dataset": "digits"}, limit=2, **options)
    out = capsys.readouterr().out
    assert "2 of 3 training runs" in out
    assert [RUNS[number].info.run_id[:8] in out for number in range(4)] == [True, True, False, False]
    print_runs(where={"train.model": "MLP", "dataset": "digits"}, limit=2, **options)
    assert "2 of 3 training runs" in capsys.readouterr().out, "as True is what MLflow has for true"
    with pytest.raises(UserError, match=r"none of 4 training runs has train.lr=none"):
        print_runs(where={"train.lr": "none"}, limit=None, **options)
    with pytest.raises(UserError, match=r"none of 4 training runs has train.model=tree; train.model is cnn or mlp"):
        print_runs(where={"train.model": "tree"}, limit=None, **options)
    monkeypatch.setattr(list_runs, "RunIndex", lambda _: lambda _: [])
    print_runs(where={}, limit=None, **options)
    assert "no training runs yet" in capsys.readouterr().out
