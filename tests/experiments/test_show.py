"""What `gradtrail show` prints is whole, whatever it is printed to, and names no way back that would lead elsewhere."""

import subprocess
from types import SimpleNamespace

import pytest
from factories import ROOT
from mlflow.entities import Run, RunData, RunInfo, RunTag
from rich.console import Console

from gradtrail.experiments import show as module
from gradtrail.experiments.show import show_experiments
from gradtrail.tracking.working_diff import CUT_OFF, NOT_IN_GIT

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
    """A cell that does not fit is folded, which changes the order of letters and drops none."""
    if width:
        monkeypatch.setattr(module, "stdout_console", lambda: Console(width=width))
    done = subprocess.CompletedProcess([], 0, EXPERIMENTS)
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=lambda *_, **__: done, PIPE=-1))
    assert show_experiments() == 0
    out = capsys.readouterr().out.replace("─", "")
    assert sorted("".join(out.split())) == sorted("".join(TABLE).replace(" ", ""))
    if width is None:
        assert [" ".join(line.split()) for line in out.splitlines() if line.strip()] == [*TABLE]


NOT_RESTORED = "# in no commit, experiment or lock; the digests above name the files"


@pytest.mark.parametrize(
    ("diff", "line"),
    [
        ("", NOT_RESTORED),
        (f"{CUT_OFF}: 17000000 bytes of changes\n", NOT_RESTORED),
        (f"{NOT_IN_GIT}pipeline/a.npz\n{CUT_OFF}: 17000000 bytes of changes\n", NOT_RESTORED),
        (f"{NOT_IN_GIT}pipeline/a.npz\n", "git checkout abcdef && dvc repro train"),
        ("diff --git a/x b/x\n", "git apply .gradtrail/restore/git.diff && dvc repro train"),
    ],
)
def test_changes_that_were_not_stored_are_not_restored(diff: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(module, "working_snapshot", lambda: None)
    monkeypatch.setattr(module, "committed_snapshots", lambda: ([], 0))
    monkeypatch.setattr(module, "has_remote", lambda: False)
    monkeypatch.setattr(module, "git", lambda command, *_: "abcdef" if command == "rev-parse" else "")
    tags = {"stage": "train", "state": "0" * 64, "mlflow.source.git.commit": "abcdef", "git.dirty": "true"}
    info = RunInfo("r", "1", "", "FINISHED", 1, 2, "active")
    run = Run(info, RunData(tags=[RunTag(*pair) for pair in tags.items()]))
    (printed,) = module._restore(run, diff)
    assert printed.endswith(line)
