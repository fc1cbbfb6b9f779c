"""The command line: verbs, options and exit statuses; a mistake is one line."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT

from gradtrail import cli
from gradtrail.experiments import repro as reproduction
from gradtrail.experiments import show as showing
from gradtrail.experiments.compare import main as comparing
from gradtrail.serving import predict as predicting

VERBS = sorted(cli.gradtrail.commands)


@pytest.fixture(autouse=True)
def start_in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs change the working folder: call them from the repository."""
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(ROOT)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Call the command; return its exit status."""
    monkeypatch.setattr("sys.argv", ["gradtrail", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bogus", "gradtrail: No such command 'bogus'. See `gradtrail --help`."),
        ("rums", "gradtrail: No such command 'rums'. Did you mean 'runs'? See"),
        ("sync --verbos", "gradtrail sync: No such option '--verbos'. (Did you mean"),
        ("ui --port 0", "gradtrail ui: Invalid value for '--port': 0 is not in the range"),
        ("show", "gradtrail show: Missing argument 'RUN'. See `gradtrail show --help`."),
        ("runs --sort-order up", "gradtrail runs: Invalid value for '--sort-order': 'up' is not one of 'asc', 'desc'."),
        (
            "runs --where train.model",
            "gradtrail: --where: must be KEY=VALUE, such as train.model=cnn; got 'train.model'",
        ),
        ("compare clip", "gradtrail: experiments.yaml: no entry clip; it has precision, "),
        (
            "compare clipping --seeds 1,1",
            "gradtrail: --seeds: must be distinct integers from 0 to 4,294,967,295, such as 0,1,2; got 1, 1",
        ),
        ("compare clipping --seeds one", "gradtrail: --seeds: must be integers separated by commas"),
        ("compare --params", "gradtrail: --params: needs KEY=VALUE,VALUE..., such as: "),
        (
            "compare --params train.sed=1",
            "gradtrail: --params.grid.train.sed is not a key of params.yaml; did you",
        ),
        ("compare x --cpus -1", "gradtrail compare: Invalid value for '--cpus': -1.0 is not in the range"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(monkeypatch, *arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.parametrize("verb", VERBS)
def test_verb_outside_of_a_project_is_refused_and_writes_nothing(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {
        "show": ["what"],
        "predict": ["image.png"],
        "export": ["--onnx", "digits.onnx"],
        "diff": ["A", "B"],
        "verdict": ["run"],
        "promote": ["run"],
        "upgrade": ["jax==0.10.1"],
    }.get(verb, [])
    assert run(monkeypatch, verb, *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"gradtrail: {tmp_path}: not inside a gradtrail repository")
    assert not [*tmp_path.iterdir()]


def test_verb_runs_in_the_project_and_paths_are_relative_to_the_working_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(showing, "show", lambda *arguments: called.append((Path.cwd(), *arguments)))
    for folder in (ROOT, ROOT / "docs" / "images"):
        monkeypatch.chdir(folder)
        assert not run(monkeypatch, "show", "report.png")
        root, word, relative = called.pop()
        assert (root, word, (root / relative).resolve()) == (ROOT, "report.png", folder)


def test_predict_reads_images_from_the_working_folder_and_the_model_of_the_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[Any] = []
    record = lambda *arguments, **options: called.append((Path.cwd(), *arguments, options))  # noqa: E731
    monkeypatch.setattr(predicting, "predict", record)
    monkeypatch.chdir(ROOT / "docs")
    assert not run(monkeypatch, "predict", "../a.png", "--figure", "b.png")
    figures = {"figure": Path("b.png"), "out": None}
    assert called.pop() == (ROOT / "docs", (Path("../a.png"),), "../models/export", Path(".."), figures)


def test_command_without_a_verb_prints_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run(monkeypatch)
    output = capsys.readouterr().out
    assert all(f"\n  {verb} " in output for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_is_a_sentence_with_an_example_that_parses(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run(monkeypatch, verb, "--help")
    command = cli.gradtrail.commands[verb]
    assert command.help
    assert command.help.partition("\n")[0].endswith(".")
    example = str(command.epilog).removeprefix("Example: gradtrail ").partition(" >")[0].split()
    assert example[0] == verb
    command.make_context(verb, example[1:])
    capsys.readouterr()


def test_repro_passes_its_arguments_to_dvc_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(reproduction, "reproduce", lambda arguments: passed.extend(arguments) or 3)
    arguments = ["--force", "-s", "train", "--glob", "eval*", "-fm", "--cwd=."]
    assert run(monkeypatch, "repro", *arguments) == 3
    assert passed == arguments


def test_ctrl_c_is_exit_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "list_entries", stopped)
    assert run(monkeypatch, "compare") == 130


def test_help_and_version_import_neither_jax_nor_mlflow(tmp_path: Path) -> None:
    code = "import atexit, sys; from gradtrail import cli; atexit.register(lambda: print([*sys.modules])); cli.main()"
    for option, expected in (("--help", "repro"), ("--version", f"gradtrail {version('gradtrail')}")):
        command = [sys.executable, "-c", code, option]
        env = {"PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
        assert expected in done.stdout
        assert not {"'jax'", "'mlflow'", "'dvc'", "'pandas'"} & {*done.stdout.strip("[]\n").split(", ")}


def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise AttributeError("a bug")

    monkeypatch.setattr(comparing, "list_entries", broken)
    monkeypatch.setattr("sys.argv", ["gradtrail", "compare"])
    with pytest.raises(AttributeError):
        cli.main()
