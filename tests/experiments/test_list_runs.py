"""`gradtrail runs`: which runs it lists, in which order, with which columns."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_store import enter_store
from projects import empty_store
from rich.console import Console

from gradtrail.experiments import list_runs
from gradtrail.experiments.list_runs import as_table, print_runs
from gradtrail.support.errors import UserError
from gradtrail.tracking.store import experiment_id
from gradtrail.tracking.trainings import find_trainings

MLP = {"train.model": "mlp", "train.mlp.hidden": "[8]", "train.cnn.hidden": "[4]", "train.epochs": "3"}
RUNS = [  # accuracy, data set, changed params
    (0.91, "digits", {"train.seed": "0"}),
    (0.93, "digits", {"train.seed": "1", "train.members": "5"}),
    (None, "digits", {"train.seed": "10"}),
    (0.99, "mnist", {"train.seed": "2", "train.model": "cnn", "train.mlp.hidden": "[16]"}),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with the trainings of RUNS, `0` to `3` by name, and a run of another stage."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        client = enter_store(empty_store(), folder, patch)
        experiment = experiment_id(client, "models")
        for number, (accuracy, dataset, changed) in enumerate(RUNS):
            run = client.create_run(experiment, tags={"stage": "train", "dataset": dataset}, run_name=str(number))
            client.log_metric(run.info.run_id, "train/seconds", 10.0 - number)
            if accuracy:
                client.log_metric(run.info.run_id, "eval/accuracy", accuracy)
                client.log_metric(run.info.run_id, "eval/accuracy_low", accuracy - 0.01)
                client.log_metric(run.info.run_id, "eval/accuracy_high", accuracy + 0.01)
            for name, value in (MLP | changed).items():
                client.log_param(run.info.run_id, name, value)
            client.set_terminated(run.info.run_id, "FINISHED" if accuracy else "KILLED")
        client.create_run(experiment, tags={"stage": "evaluate"}, run_name="evaluate")
        yield folder


@pytest.fixture
def console(store: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    """What is printed."""
    console = Console(width=200, record=True, file=io.StringIO())
    monkeypatch.setattr(list_runs, "stdout_console", lambda: console)
    return console


def listed(console: Console, **options: object) -> list[str]:
    """Return the lines of the table, without its title."""
    print_runs(**({"sort_by": "eval/accuracy", "ascending": False, "where": {}, "limit": 50} | options))
    return [line.strip() for line in console.export_text().splitlines() if line.strip()][1:]


def names(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines[2:]]


def test_table_has_differing_params_and_marks_the_best_of_each_data_set(console: Console) -> None:
    lines = listed(console)
    assert names(lines) == ["3", "1", "0", "2"], "runs without an accuracy are last"
    assert {"dataset", "model", "seed", "status"} <= {*lines[0].split()}
    assert "hidden" not in lines[0], "only one run is a CNN, and all others have the same MLP"
    assert "epochs" not in lines[0], "the same in all"
    assert ["*" in line for line in lines[2:]] == [True, True, False, False]
    assert "* 93.00 (92.00–94.00)" in lines[3]
    assert "1–5" in lines[3], "the seeds of its members"


def test_runs_are_sorted_filtered_and_limited(console: Console) -> None:
    assert names(listed(console, sort_by="train/seconds", ascending=True)) == ["3", "2", "1", "0"]
    lines = listed(console, where={"train.model": "MLP", "dataset": "digits"}, limit=2)
    assert names(lines[:-1]) == ["1", "0"]
    assert lines[-1] == "--limit 4 lists more"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": {"train.lr": "0"}}, "none of 4 training runs has train.lr=0; train.lr is not a param"),
        ({"where": {"train.model": "tree"}}, "has train.model=tree; train.model is cnn or mlp"),
        ({"where": {"train.model": "m_p"}}, "has train.model=m_p; train.model is cnn or mlp"),
        ({"where": {"dataset": 'it\'s "x"'}}, 'has dataset=it\'s "x"; dataset is '),
        ({"sort_by": "train/secs"}, "no run has the metric 'train/secs'; did you mean 'train/seconds'"),
    ],
)
def test_value_or_metric_of_no_run_is_one_line(options: dict[str, object], message: str, console: Console) -> None:
    with pytest.raises(UserError, match=message):
        listed(console, **options)


def test_narrow_terminal_has_all_metrics(store: Path) -> None:
    runs = find_trainings("eval/accuracy", ascending=False, limit=None)
    for width, num_tables in ((200, 1), (70, 3)):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(as_table(runs))
        text = console.export_text()
        assert text.count(" run ") == num_tables
        assert {"* 93.00 (92.00–94.00)", "9.0 s"} <= {*re.split(r"\s{2,}", text)}


def test_empty_store_points_to_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter_store(empty_store(), tmp_path, monkeypatch)
    print_runs(sort_by="eval/accuracy", ascending=False, where={"train.model": "mlp"}, limit=50)
    assert "`gradtrail sync` adds those of earlier results" in capsys.readouterr().out
