"""The versions on record are those that are locked and installed."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from factories import ROOT

from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.versions import require_recorded_versions, write_installed_versions
from gradtrail.support.errors import UserError

RECORDED = read_yaml(ROOT / "pipeline/versions.yaml")


@pytest.mark.parametrize("package", RECORDED)
def test_recorded_versions_are_locked_and_installed(package: str) -> None:
    pins = re.findall(rf"^{package}==([^\s;]+)", (ROOT / "locks/base.lock").read_text(), flags=re.MULTILINE)
    assert RECORDED[package] in pins
    assert RECORDED[package] == version(package)


def test_installed_versions_are_recorded_and_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pipeline").mkdir()
    Path("pipeline/versions.yaml").write_text('numpy: "1.0"\njax: "0.1"\n')
    require_recorded_versions(())
    with pytest.raises(UserError, match=rf"it has numpy 1\.0, but {re.escape(version('numpy'))} is installed"):
        require_recorded_versions(("numpy",))
    with pytest.raises(UserError, match="it has flax None"):
        require_recorded_versions(("flax",))
    assert write_installed_versions() == {"numpy": version("numpy"), "jax": version("jax")}
    require_recorded_versions(("numpy", "jax"))
    assert Path("pipeline/versions.yaml").read_text().startswith("# ")
