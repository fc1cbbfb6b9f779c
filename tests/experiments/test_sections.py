"""The sections of the params: the class of each is found in the scripts, and what no stage reads is refused."""

from pathlib import Path

import pytest
from factories import ROOT
from ruamel.yaml import YAML

from gradtrail.experiments.sections import require_known_sections, section_configs
from gradtrail.stages.common.params import read_yaml
from gradtrail.support.errors import UserError

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
