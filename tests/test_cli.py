"""The command line: verbs, options and exit statuses; a mistake is one line."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from factories import ROOT

from gradtrail import cli
from gradtrail.experiments import repro as reproduction
from gradtrail.experiments import show as showing
from gradtrail.experiments.compare import main as comparing
from gradtrail.serving import predict as predicting

VERBS = sorted(cli.gradtrail.commands)
REQUIRED = {
    "show": ["what"],
    "try": ["-S", "train.epochs=1"],
    "checkout": ["what"],
    "predict": ["image.png"],
    "export": ["--onnx", "digits.onnx"],
    "diff": ["A", "B"],
    "verdict": ["run"],
    "promote": ["run"],
    "upgrade": ["jax==0.10.1"],
}


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


def test_interpreter_is_named_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, status in (("python3.12", 0), ("python3.13", 127)):  # the latter as a shim of pyenv
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli._path_of_python("3.12") == tmp_path / "python3.12"
    for text in ("3.13", "3.14"):
        with pytest.raises(click.BadParameter, match=f"no interpreter of Python at '{text}'"):
            cli._path_of_python(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bogus", ": No such command 'bogus'. See `gradtrail --help`."),
        ("rums", ": No such command 'rums'. Did you mean 'runs'? See"),
        ("sync --verbos", " sync: No such option '--verbos'. Did you mean '--verbose'?"),
        ("ui --port 0", " ui: Invalid value for '--port': 0 is not in the range"),
        ("runs --sort-order up", " runs: Invalid value for '--sort-order': 'up' is not one of 'asc', 'desc'."),
        ("runs --where train.model", " runs: Invalid value for '--where': must be KEY=VALUE, such as "),
        (
            "upgrade jax==1 --python /none",
            " upgrade: Invalid value for '--python': no interpreter of Python at",
        ),
        ("compare clip", ": experiments.yaml: no entry clip; it has precision, "),
        ("compare clipping --seeds 1,1", ": --seeds: must be distinct integers from 0 to 4,294,967,295, such as 0,1,2"),
        ("compare clipping --seeds one", " compare: Invalid value for '--seeds': must be integers separated by commas"),
        ("compare --params", ": --params: needs KEY=VALUE,VALUE..., such as: "),
        ("compare --params train.sed=1", ": --params: params.yaml has no key 'train.sed'; did you"),
        ("compare x --cpus -1", " compare: Invalid value for '--cpus': -1.0 is not in the range"),
        ("what-if --subsets 2", " what-if: Invalid value for '--subsets': 2 is not in the range x>=3."),
        ("what-if --test -1", " what-if: Invalid value for '--test': -1 is not in the range x>=0."),
        ("review --merge", ": --merge: needs files to merge, such as: "),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gradtrail{message}")


@pytest.mark.parametrize("verb", VERBS)
def test_verb_outside_of_a_project_is_refused_and_writes_nothing(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, verb, *REQUIRED.get(verb, [])) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"gradtrail: {tmp_path}: not inside a gradtrail repository")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("folder", [ROOT, ROOT / "docs" / "images"])
def test_paths_are_relative_to_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`predict` stays there, where the images are; other verbs run in the project's folder."""
    calls: list[Any] = []
    record = lambda *arguments, **options: calls.append((Path.cwd(), *arguments))  # noqa: E731
    monkeypatch.setattr(showing, "show", record)
    monkeypatch.setattr(predicting, "predict", record)
    monkeypatch.chdir(folder)
    assert not run(monkeypatch, "show", "report.png")
    root, word, relative = calls.pop()
    assert (root, word, (root / relative).resolve()) == (ROOT, "report.png", folder)
    monkeypatch.chdir(folder)
    assert not run(monkeypatch, "predict", "a.png")
    here, images, model, project = calls.pop()
    assert (here, images, (here / project).resolve()) == (folder, (Path("a.png"),), ROOT)
    assert (here / model).resolve() == ROOT / "models" / "export"


def test_command_without_a_verb_prints_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run(monkeypatch)
    output = capsys.readouterr().out
    assert all(f"\n  {verb} " in output for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_is_a_sentence_with_an_example_that_parses(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run(monkeypatch, verb, "--help")
    command = cli.gradtrail.commands[verb]
    assert command.help
    assert command.help.partition("\n")[0].endswith(".")
    example = str(command.epilog).removeprefix("Example: gradtrail ").partition(" >")[0].split()
    assert example[0] == verb
    command.make_context(verb, example[1:])


def test_repro_passes_its_arguments_to_dvc_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(reproduction, "reproduce", lambda arguments: passed.extend(arguments) or 3)
    arguments = ["--force", "-s", "train", "--glob", "eval*", "-fm", "--cwd=."]
    assert run(monkeypatch, "repro", *arguments) == 3
    assert passed == arguments


@pytest.mark.parametrize(
    ("fault", "status"), [(KeyboardInterrupt(), 130), (OSError("down"), 2), (AttributeError("a bug"), None)]
)
def test_how_a_verb_ends(fault: BaseException, status: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise fault

    monkeypatch.setattr(comparing, "list_entries", fail)
    if status:
        assert run(monkeypatch, "compare") == status
    else:  # a bug keeps its traceback
        monkeypatch.setattr("sys.argv", ["gradtrail", "compare"])
        with pytest.raises(type(fault)):
            cli.main()


@pytest.mark.parametrize(("option", "text"), [("--help", "repro"), ("--version", f"gradtrail {version('gradtrail')}")])
def test_help_and_version_import_neither_jax_nor_mlflow(option: str, text: str, tmp_path: Path) -> None:
    code = "import atexit, sys; from gradtrail import cli; atexit.register(lambda: print([*sys.modules])); cli.main()"
    command, env = [sys.executable, "-c", code, option], {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert text in result.stdout
    assert not {"'jax'", "'mlflow'", "'dvc'", "'pandas'"} & {*result.stdout.strip("[]\n").split(", ")}
