"""`gradtrail repro` around `dvc repro`: what it validates, and what it does if the store or a source fails."""

import json
import re
import shutil
from pathlib import Path

import pytest
from factories import ROOT

from gradtrail.experiments import repro
from gradtrail.experiments.param_classes import SECTIONS
from gradtrail.stages.common.params import read_params
from gradtrail.stages.common.pipeline_file import PARAMS_FILES
from gradtrail.support.errors import UserError


@pytest.fixture(autouse=True)
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The params of the repository, in a folder of their own; returns the path of `params.yaml`."""
    monkeypatch.chdir(tmp_path)
    for file in map(Path, PARAMS_FILES):
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, file)
    return Path("params.yaml")


def test_every_section_of_the_repository_has_a_class() -> None:
    assert SECTIONS.keys() == read_params(ROOT).keys()


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("params.yaml", "num_mistakes: 40", "num_mistakes: forty", r"evaluate\.num_mistakes"),
        ("params.yaml", "\nreport:", "\nreports:", r"no stage reads the section 'reports'; did you mean 'report'\?$"),
        ("params.yaml", "\nfetch:", "\n# café\nfetch:", r"not UTF-8 at byte \d+; save it as UTF-8$"),
        ("params.yaml", "\nreport:", "\naudit:", "the section 'audit' belongs in pipeline/audit/params.yaml$"),
        ("pipeline/audit/params.yaml", "folds: 2", "folds: 1", r"audit\.folds must be at least 2"),
        ("pipeline/what_if/params.yaml", "\nwhat_if:", "\nwhatif:", "no stage reads the section 'whatif'; did you"),
        ("pipeline/what_if/params.yaml", "\nwhat_if:", "\ntrain:", "the section 'train' belongs in params.yaml$"),
    ],
)
def test_invalid_params_are_refused_before_any_stage_runs(file: str, old: str, new: str, message: str) -> None:
    path = Path(file)
    path.write_text(path.read_text().replace(old, new), encoding="latin-1")
    with pytest.raises(UserError, match=f"^{re.escape(file)}: {message}"):
        repro.validate_params()


def test_last_line_has_the_balanced_accuracy_where_classes_are_unequal(capsys: pytest.CaptureFixture[str]) -> None:
    """`evaluate` writes that metric only then."""
    metrics = {"dataset": "folder", "accuracy": 0.9, "accuracy_low": 0.88, "accuracy_high": 0.92}
    balanced = {"balanced_accuracy": 0.5, "balanced_accuracy_low": 0.4, "balanced_accuracy_high": 0.6}
    path = Path("results/metrics/evaluate.json")
    path.parent.mkdir(parents=True)
    lines = []
    for written in (metrics, metrics | balanced):
        path.write_text(json.dumps(written))
        repro._summarize(95.2)
        lines.append(capsys.readouterr().out.splitlines()[0])
    first = "folder: test accuracy 90.00% (95 % interval 88.00% to 92.00%)"
    second = "balanced accuracy 50.00% (95 % interval 40.00% to 60.00%)"
    assert lines == [f"{first}, in 95 s", f"{first}, {second}, in 95 s"]


def test_valid_params_are_validated_again_only_after_a_change(params: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validated: list[str] = []
    real = repro.load_section
    monkeypatch.setattr(repro, "load_section", lambda name, into: validated.append(name) or real(name, into))
    for change in ("", "# a comment\n", "my_stage: 3\n"):
        params.write_text(params.read_text() + change)
        repro.validate_params()
        assert {*validated} == {*SECTIONS}
        validated.clear()
        repro.validate_params()
        assert validated == ["environment"]
        validated.clear()


def test_dvc_is_not_started_after_it_had_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_fit_dvc_to_git", "validate_params", "backfill", "warn_of_processor"):
        monkeypatch.setattr(repro, name, lambda: None)
    dep, out = Path("dep.txt"), Path("out.txt")
    pipeline = {"stages": {"copy": {"cmd": "cp dep.txt out.txt", "deps": [str(dep)], "outs": [str(out)]}}}
    Path("dvc.yaml").write_text(json.dumps(pipeline))
    started: list[list[str]] = []

    def run_dvc(arguments: list[str]) -> int:
        started.append(arguments)
        if dep.is_file():
            out.write_text(dep.read_text()) if not out.is_file() or out.read_text() != dep.read_text() else None
        return 0 if dep.is_file() else 255

    monkeypatch.setattr(repro, "run_dvc", run_dvc)
    for content, arguments, status, starts in [
        (None, [], 255, 1),  # no dep: fails, and again
        (None, [], 255, 1),
        ("1", [], 0, 1),  # runs
        (None, [], 0, 1),  # nothing to do
        (None, [], 0, 0),
        (None, ["--force"], 0, 1),
        ("2", [], 0, 1),
        (None, ["copy"], 0, 1),  # nothing to do for a target says nothing of the others
        (None, [], 0, 1),
        (None, [], 0, 0),
    ]:
        if content:
            dep.write_text(content)
        assert repro.reproduce(arguments) == status
        assert len(started) == starts, (content, arguments)
        assert ("up to date" in capsys.readouterr().out) == (starts == 0)
        started.clear()


def test_failing_store_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> None:
        raise OSError("no such host")

    monkeypatch.setattr(repro, "sync", failing)
    repro.backfill()
    assert capsys.readouterr().err == ("warning: MLflow's store failed: no such host; `gradtrail sync` tries again\n")


@pytest.mark.parametrize("is_common", [True, False])
@pytest.mark.parametrize("status", ["", " M dvc.lock"])
def test_a_processor_that_makes_other_bytes_is_told(
    is_common: bool, status: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repro, "has_common_bytes", lambda: is_common)
    monkeypatch.setattr(repro, "git", lambda *_: status)
    repro.warn_of_processor()
    printed = capsys.readouterr().err
    assert printed.count("\n") == (not is_common and bool(status))
    assert not printed or "lacks AVX2 or FMA" in printed


def test_stand_in_changes_one_word_and_is_announced(params: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = params.read_text()
    repro.remind_of_stand_in()
    assert capsys.readouterr().err == ""
    repro.use_stand_in()
    assert params.read_text() == before.replace("dataset: mnist", "dataset: digits")
    assert "No source of MNIST answered; fetch.dataset in params.yaml is now digits" in capsys.readouterr().err
    repro.remind_of_stand_in()
    output = capsys.readouterr().err
    assert all(text in output for text in ("NOT MNIST", "fetch.dataset: mnist", "MNIST_DIR"))
    params.write_text("fetch: {'dataset' : mnist}\n")
    with pytest.raises(UserError, match=r"fetch\.dataset could not be changed"):
        repro.use_stand_in()
