"""What `gradtrail show` prints is whole, whatever it is printed to."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gradtrail.experiments import show as module
from gradtrail.experiments.show import show_experiments
from gradtrail.tracking.tags import START_RUN

EXPERIMENTS = """Experiment,rev,State,validation_accuracy,accuracy,train.model,train.mlp.hidden,train.precision
,workspace,,0.9535,0.9444,mlp,"[256, 128]",float32
a-long-name-of-an-experiment,2c50ef5,Queued,,,mlp,"[256, 128]",bfloat16
"""
TABLE = (
    *("experiments of this commit", "experiment State validation accuracy model mlp.hidden precision"),
    "workspace 0.9535 0.9444 mlp [256, 128] float32",
    "a-long-name-of-an-experiment Queued mlp [256, 128] bfloat16",
)


@pytest.mark.parametrize("width", [80, 60, None])
def test_no_cell_of_the_experiments_is_cut(
    width: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if width:
        monkeypatch.setattr(module, "stdout_console", lambda: Console(width=width))
    done = subprocess.CompletedProcess([], 0, EXPERIMENTS)
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=lambda *_, **__: done, PIPE=-1))
    assert show_experiments() == 0
    out = capsys.readouterr().out.replace("─", "")
    assert {*out.split()} == {*" ".join(TABLE).split()}
    if width is None:
        assert [" ".join(line.split()) for line in out.splitlines() if line.strip()] == [*TABLE]


class Index(dict[str, Any]):
    """Runs by their id, none of which is a child."""

    def __call__(self, tags: dict[str, str]) -> list[Any]:
        return []


def test_run_from_trained_weights_names_the_run_that_wrote_them() -> None:
    tuned, first = (
        SimpleNamespace(
            info=SimpleNamespace(run_id=name * 12, run_name=f"run {name}", start_time=0, status="FINISHED"),
            data=SimpleNamespace(tags={"state": name}, metrics={}),
        )
        for name in ("tuned", "first")
    )
    index: Any = Index({first.info.run_id: first})
    assert not [line for line in module._head(tuned, index) if "start" in line]
    tuned.data.tags[START_RUN] = first.info.run_id
    assert [line for line in module._head(tuned, index) if "start" in line] == ["  start      firstfirstfi  run first"]
