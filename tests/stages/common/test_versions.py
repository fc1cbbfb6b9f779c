"""Networks of one's own: what their files may import and do, before anything runs."""

import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from factories import ROOT

from gradtrail.core.train.config import TrainConfig
from gradtrail.stages.common.params import validate
from gradtrail.stages.common.pipeline_file import read_pipelines
from gradtrail.stages.common.versions import NETWORK_VERSIONS, OF_EVERY_NETWORK, VERSIONS, write_installed_versions
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError

HEADER = "import sys\nfrom gradtrail.core.config import Count, config\n"
NETWORK = """
@config
class Network:
    width: Count
    def build(self, shape, num_classes, *, rngs):
        raise NotImplementedError
"""
LATE = NETWORK.replace("raise NotImplementedError", "import {}")
RECORD = f"{NETWORK_VERSIONS} has no {{}}; `gradtrail versions` records it, so that another version trains again"
PLACE = "params.yaml: train.own.file: pipeline/networks/mine.py"
CLASS = "params.yaml: train.own.file: the class Network of mine.py fails"

# Text of the file → the error
REFUSED = {
    f"import optax\n{NETWORK}": f"pipeline/networks/mine.py imports optax: {RECORD.format('optax')}",
    LATE.format("sklearn.svm"): f"pipeline/networks/mine.py imports sklearn: {RECORD.format('scikit-learn')}",
    LATE.format("no_such_package"): "pipeline/networks/mine.py imports no_such_package, which is no installed package",
    LATE.format("blocks"): "pipeline/networks/mine.py imports blocks, which is no installed package; "
    "import blocks.py by `from .blocks import ...`",
    f"from .blocks import WORD\n{NETWORK}": f"pipeline/networks/mine.py imports pandas: {RECORD.format('pandas')}",
    f"import equinox\n{NETWORK}": f"{NETWORK_VERSIONS}: it has equinox 0.1, but {version('equinox')} is installed: "
    "install locks/base.lock, or record the installed versions with `gradtrail versions`",
    f"import no_such_package\n{NETWORK}": f"{PLACE}:3: import fails: ModuleNotFoundError: No module named "
    "'no_such_package'",
    "def f(:": f"{PLACE}:3: import fails: SyntaxError: invalid syntax (mine.py, line 3)",
    "from .broken import WORD": f"{PLACE}:3: import fails: SyntaxError: invalid syntax (broken.py, line 1)",
    "sys.exit(0)": f"{PLACE}:3: import fails: SystemExit: 0",
    f"{NETWORK}    def check(self):\n        sys.exit()": f"{CLASS}: SystemExit:",
    NETWORK.replace("Count", "'Unknown'"): f"{CLASS}: NameError: name 'Unknown' is not defined",
    NETWORK.replace("Count", "sys.exit"): f"{CLASS}: PydanticSchemaGenerationError: ",
}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Validate `train` with a network of this text."""
    monkeypatch.chdir(tmp_path)
    NETWORK_VERSIONS.parent.mkdir(parents=True)
    NETWORK_VERSIONS.write_text('equinox: "0.1"\nelsewhere: "1.0"\n')
    VERSIONS.write_text('optax: "0.1"\n')
    (NETWORK_VERSIONS.parent / "blocks.py").write_text("WORD = 1\ndef late():\n    import pandas\n")
    (NETWORK_VERSIONS.parent / "broken.py").write_text("WORD =")
    section = read_yaml(ROOT / "params.yaml")["train"] | {"model": "own", "own": {"file": "mine", "width": 3}}

    def check(text: str) -> None:
        (NETWORK_VERSIONS.parent / "mine.py").write_text(HEADER + text)
        validate(section, TrainConfig, "params.yaml: train")

    return check


@pytest.mark.parametrize("text", REFUSED)
def test_file_of_a_network_is_refused_in_one_line(check: Callable[[str], None], text: str) -> None:
    with pytest.raises(UserError) as caught:
        check(text)
    assert str(caught.value).startswith(REFUSED[text])
    assert "\n" not in str(caught.value)


def test_recorded_packages_may_be_imported(check: Callable[[str], None]) -> None:
    """Those of every network are recorded in `pipeline/versions.yaml`; another file of the folder may be imported."""
    (NETWORK_VERSIONS.parent / "broken.py").unlink()
    text = f"import jax, flax.nnx, numpy, math\nimport equinox\nfrom . import other\nfrom .other import WORD\n{NETWORK}"
    (NETWORK_VERSIONS.parent / "other.py").write_text("import optax\nWORD = 'other'\n")
    with pytest.raises(UserError):
        check(text)
    (NETWORK_VERSIONS.parent / "blocks.py").unlink()
    recorded = {package: version(package) for package in ("equinox", "optax")}
    assert write_installed_versions() == recorded | {"elsewhere": "1.0"}
    assert read_yaml(NETWORK_VERSIONS) == recorded | {"elsewhere": "1.0"}, "one that is not installed stays"
    check(text)


def test_packages_of_every_network_are_params_of_each_stage_that_builds_networks() -> None:
    specs = [spec for spec in read_pipelines(ROOT).values() if "pipeline/networks" in spec.deps]
    assert len(specs) > 5
    assert all({*spec.params[str(VERSIONS)]} >= OF_EVERY_NETWORK for spec in specs)


def test_networks_of_the_project_import_recorded_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline")
    monkeypatch.chdir(tmp_path)
    write_installed_versions()
    for file in (NETWORK_VERSIONS, VERSIONS):
        assert file.read_bytes() == (ROOT / file).read_bytes()
