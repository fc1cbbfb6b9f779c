"""The command line: verbs, options and exit statuses; a mistake is one line."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT

from gradtrail import cli
from gradtrail.experiments import predict as predicting
from gradtrail.experiments import repro as reproduction
from gradtrail.experiments.sweep import recipes


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Call the command; return its exit status."""
    monkeypatch.setattr("sys.argv", ["gradtrail", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "gradtrail: Missing command. See `gradtrail --help`."),
        ("bogus", "gradtrail: No such command 'bogus'."),
        ("show", "gradtrail show: Missing argument 'WHAT'. See `gradtrail show --help`."),
        ("sync --jobs 2", "gradtrail sync: No such option '--jobs'."),
        ("runs --limit 0", "gradtrail runs: Invalid value for '--limit': 0 is not in the range"),
        ("runs --sort-order up", "gradtrail runs: Invalid value for '--sort-order': 'up' is not one of 'asc', 'desc'."),
        (
            "runs --where train.model",
            "gradtrail: --where: must be KEY=VALUE, such as train.model=cnn; got 'train.model'",
        ),
        ("compare clip", "gradtrail: comparisons.yaml: no comparison clip; it has precision, "),
        (
            "compare clipping --seeds 1,1",
            "gradtrail: --seeds: must be distinct integers from 0 to 4,294,967,295, such as 0,1,2; got 1, 1",
        ),
        ("compare clipping --seeds one", "gradtrail: --seeds: must be integers separated by commas"),
        ("compare clipping --jobs 0", "gradtrail compare: Invalid value for '--jobs': 0 is not in the range"),
        ("recipes mpl", "gradtrail: recipes.yaml: no recipe mpl; it has mlp, "),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(monkeypatch, *arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_repro_passes_its_arguments_on_in_their_order_and_returns_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(reproduction, "reproduce", lambda arguments: passed.extend(arguments) or 3)
    arguments = ["--force", "-s", "train", "--glob", "eval*", "-fm", "--cwd=."]
    assert run(monkeypatch, "repro", *arguments) == 3
    assert passed == arguments


def test_the_old_name_of_an_option_works_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(predicting, "predict", lambda *arguments: called.append(arguments))
    for option in ("--figure", "--picture"):
        assert not run(monkeypatch, "predict", "a.png", "b.png", option, "c.png")
        assert called.pop() == ((Path("a.png"), Path("b.png")), Path("models/final.safetensors"), Path("c.png"))
    assert "The option 'picture' is deprecated. Use --figure." in capsys.readouterr().err


def test_ctrl_c_is_exit_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipes, "list_recipes", stopped)
    assert run(monkeypatch, "recipes") == 130


def test_help_and_version_import_neither_jax_nor_mlflow(tmp_path: Path) -> None:
    code = "import atexit, sys; from gradtrail import cli; atexit.register(lambda: print([*sys.modules])); cli.main()"
    for option, said in (("--help", "repro"), ("--version", f"gradtrail {version('gradtrail')}")):
        command = [sys.executable, "-c", code, option]
        env = {"PYTHONPATH": str(ROOT / "src")}
        told = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
        assert said in told.stdout
        assert not {"'jax'", "'mlflow'", "'dvc'", "'pandas'"} & {*told.stdout.strip("[]\n").split(", ")}


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise AttributeError("a bug")

    monkeypatch.setattr(recipes, "list_recipes", broken)
    monkeypatch.setattr("sys.argv", ["gradtrail", "recipes"])
    with pytest.raises(AttributeError):
        cli.main()
