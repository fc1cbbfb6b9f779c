"""`gradtrail review` from the command line: what is missing or does not fit is one line; files are joined."""

import dataclasses
import sys
from pathlib import Path

import pytest
from reviewing import write_project

from gradtrail import cli
from gradtrail.experiments.review import main
from gradtrail.experiments.review.suspects import PATH as SUSPECTS
from gradtrail.stages.preprocess.corrections import PATH, Correction, read_corrections, write_corrections
from gradtrail.support.errors import UserError

ROW = Correction(split="train", example_id=7, old=1, new=2, reviewer="Ann", time="", reason="")


def mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Call `gradtrail review`; return the line that it ends with, with exit status 2."""
    monkeypatch.setattr(sys, "argv", ["gradtrail", "review", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for part in (".dvc", "src/gradtrail"):  # of a project
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "dvc.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_missing_audit_or_files_to_merge_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = mistake(monkeypatch, capsys, "--port", "0")
    assert line == f"gradtrail: {SUSPECTS}: no such file; run `make audit` first, which finds the labels to look at"
    assert mistake(monkeypatch, capsys, "--merge").startswith("gradtrail: --merge: needs files to merge")
    assert mistake(monkeypatch, capsys, "a.csv").startswith("gradtrail: --merge: needs files to merge")


def test_corrections_of_other_labels_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    split = write_project(folder)["train"]
    old = int(split.labels[0] + 1) % 3
    write_corrections(PATH, [dataclasses.replace(ROW, example_id=int(split.example_id[0]), old=old)])
    line = mistake(monkeypatch, capsys, "--port", "0")
    assert line.startswith(
        f"gradtrail: {PATH}: train {split.example_id[0]}: old is {old}, but the label (after label noise) is "
    )


def test_reviewer_name_that_is_a_formula_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_project(folder)
    line = mistake(monkeypatch, capsys, "--port", "0", "--reviewer", "=1")
    assert line.startswith("gradtrail: --reviewer begins with '='")


def test_split_and_limit_restrict_the_suspects(folder: Path) -> None:
    write_project(folder)
    whole = main.prepare(PATH, reviewer="Ann", split=None, limit=200)
    part = main.prepare(PATH, reviewer="Ann", split="validation", limit=4)
    assert len(whole.suspects) == 41
    assert [suspect.split for suspect in part.suspects] == ["validation"] * 4
    assert part.state()["progress"]["expected_left"] == whole.state()["progress"]["expected_left"]


def test_agreeing_files_are_merged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corrections(Path("ann.csv"), [ROW, dataclasses.replace(ROW, example_id=8)])
    write_corrections(
        Path("ben.csv"), [dataclasses.replace(ROW, reviewer="Ben"), dataclasses.replace(ROW, example_id=9, new=None)]
    )
    main.merge([Path("ann.csv"), Path("ben.csv")])
    rows = read_corrections(PATH)
    assert [(row.example_id, row.reviewer) for row in rows] == [(7, "Ann"), (8, "Ann"), (9, "Ann")]
    assert capsys.readouterr().out == f"{PATH}: 3 decisions, 2 of them corrections\n"


def test_disagreements_are_listed_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corrections(PATH, [ROW])
    before = PATH.read_bytes()
    write_corrections(Path("ann.csv"), [ROW, dataclasses.replace(ROW, example_id=8)])
    write_corrections(Path("ben.csv"), [dataclasses.replace(ROW, reviewer="Ben", new=None)])
    monkeypatch.setattr(sys, "argv", ["gradtrail", "review", "--merge", "ann.csv", "ben.csv"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert output.out == "train 7: Ann says 1 → 2, Ben says it cannot be told\n"
    assert output.err == f"gradtrail: 1 examples are decided differently; {PATH} was not changed\n"
    assert PATH.read_bytes() == before


def test_merge_keeps_decisions_of_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    existing = dataclasses.replace(ROW, example_id=3, reviewer="Eve")
    write_corrections(PATH, [existing])
    write_corrections(Path("ann.csv"), [ROW])
    main.merge([Path("ann.csv")])
    assert read_corrections(PATH) == [existing, ROW]
    before = PATH.read_bytes()
    write_corrections(Path("ben.csv"), [dataclasses.replace(existing, reviewer="Ben", new=1)])
    capsys.readouterr()
    with pytest.raises(UserError, match="1 examples are decided differently"):
        main.merge([Path("ben.csv")])
    assert capsys.readouterr().out == "train 3: Eve says 1 → 2, Ben says 1 is right\n"
    assert PATH.read_bytes() == before


def test_files_are_relative_to_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "labels").mkdir()
    monkeypatch.chdir(folder / "labels")
    write_corrections(Path("ann.csv"), [ROW])
    for options, target in (((), folder / PATH), (("--file", "all.csv"), folder / "labels" / "all.csv")):
        monkeypatch.chdir(folder / "labels")
        monkeypatch.setattr(sys, "argv", ["gradtrail", "review", "--merge", "ann.csv", *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert read_corrections(target) == [ROW]
