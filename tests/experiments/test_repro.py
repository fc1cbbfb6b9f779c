"""`gradtrail repro` around `dvc repro`: what it validates, and what it does if the store or a source fails."""

import shutil
from pathlib import Path

import pytest
from factories import ROOT
from ruamel.yaml import YAML

from gradtrail.experiments import repro
from gradtrail.experiments.sections import require_known_sections, section_configs
from gradtrail.stages.common.params import read_yaml
from gradtrail.support.errors import UserError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the params, the pipelines and the scripts of the repository."""
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_invalid_section_is_refused_before_any_stage_runs(project: Path) -> None:
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("num_mistakes: 40", "num_mistakes: forty"))
    with pytest.raises(UserError, match=r"^params\.yaml: evaluate\.num_mistakes"):
        repro._validate_params()


@pytest.mark.parametrize("name", ["params.yaml", "pipeline/audit/dvc.yaml"])
def test_file_in_another_encoding_is_refused_before_any_stage_runs(name: str, project: Path) -> None:
    Path(name).write_text(f"{Path(name).read_text(encoding='utf-8')}# café\n", encoding="latin-1")
    with pytest.raises(UserError, match=rf"^{name}: not UTF-8 at byte \d+; save it as UTF-8$"):
        repro._validate_params()


def test_valid_params_are_validated_again_only_after_a_change(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validated: list[str] = []
    real = repro.load_section
    monkeypatch.setattr(repro, "load_section", lambda name, into: validated.append(name) or real(name, into))
    sections = [*section_configs()]
    for change in ("", "# a comment\n", "# another\n"):
        Path("params.yaml").write_text(Path("params.yaml").read_text() + change)
        repro._validate_params()
        assert {*validated} == {*sections}
        validated.clear()
        repro._validate_params()
        assert validated == ["environment"]
        validated.clear()


def test_failing_store_is_a_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        raise OSError("no such host")

    monkeypatch.setattr(repro, "sync", failing)
    repro._backfill()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "warning: MLflow's store failed: no such host; `gradtrail sync` tries again"


def test_switching_to_the_digits_changes_one_word(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("params.yaml").read_text()
    repro._use_stand_in()
    assert Path("params.yaml").read_text() == before.replace("dataset: mnist", "dataset: digits")
    assert "Continuing with scikit-learn's digits" in capsys.readouterr().err
    Path("params.yaml").write_text("fetch: {'dataset' : mnist}\n")
    with pytest.raises(UserError, match=r"fetch\.dataset could not be changed"):
        repro._use_stand_in()


def test_reminder_is_printed_for_a_stand_in_only(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repro._remind_of_stand_in()
    assert capsys.readouterr().err == ""
    repro._use_stand_in()
    capsys.readouterr()
    repro._remind_of_stand_in()
    output = capsys.readouterr().err
    assert "NOT MNIST" in output
    assert "fetch.dataset: mnist" in output
    assert "MNIST_DIR" in output


TOY = """
from toy_config import ToyConfig, other

def main(stage):
    use(stage.params(ToyConfig).effective, stage.params(here), stage.params(ToyConfig, "shared"), other.params(there))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline of one stage, whose config class is in a module of its own, and of one whose script is gone."""
    (tmp_path / "toy_config.py").write_text("class ToyConfig: ...")
    (tmp_path / "toy.py").write_text(TOY)
    stages = {
        "toy": {"cmd": "it", "deps": ["data", "toy.py"], "params": ["toy", "shared.one", "environment.xla_flags"]},
        "gone": {"cmd": "it", "deps": ["gone.py"], "params": ["gone", {"pipeline/versions.yaml": ["numpy"]}]},
    }
    YAML(typ="safe").dump({"stages": stages}, tmp_path / "dvc.yaml")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(folder: Path, *sections: str) -> None:
    YAML(typ="safe").dump(dict.fromkeys(sections, 1), folder / "params.yaml")


def test_sections_of_the_repository_have_a_class() -> None:
    assert {*section_configs(ROOT)} == {*read_yaml(ROOT / "params.yaml")}
    require_known_sections(ROOT)


def test_section_of_a_new_stage_needs_no_registration(folder: Path) -> None:
    classes = {section: config.__name__ for section, config in section_configs(folder).items()}
    assert classes == {
        "toy": "ToyConfig",
        "shared": "ToyConfig",
        "environment": "EnvironmentConfig",
        "runtime": "RuntimeConfig",
    }


def test_misspelled_section_is_refused(folder: Path) -> None:
    write(folder, "toy", "shared", "gone", "environment", "runtime", "numpy")
    require_known_sections(folder)
    write(folder, "toy", "toys")
    with pytest.raises(UserError, match=r"^params\.yaml: no stage reads the section 'toys'; did you mean 'toy'\?$"):
        require_known_sections(folder)
