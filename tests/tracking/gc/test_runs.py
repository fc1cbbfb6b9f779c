"""Which folders belong to a run whose store may be damaged: none outside of `mlruns/`."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from gradtrail.tracking.gc.runs import _own_folders


def folders(root: Path, run_id: str, location: str, *models: tuple[str, str]) -> list[Path]:
    run = SimpleNamespace(info=SimpleNamespace(run_id=run_id, artifact_uri=location))
    made = [SimpleNamespace(model_id=name, artifact_location=place) for name, place in models]
    return [path.relative_to(root) for path in _own_folders(run, made)]  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    return tmp_path


def test_the_folders_of_a_run_and_its_models(root: Path) -> None:
    model = ("m-1", f"{root}/mlruns/models/m-1/artifacts")
    found = folders(root, "ab", (root / "mlruns/ab/artifacts").as_uri(), model)
    assert found == [Path("mlruns/ab"), Path("mlruns/models/m-1")]
    assert folders(root, "ab", "s3://bucket/ab/artifacts", ("m-1", "/elsewhere/m-1/artifacts")) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../..", "../data", "a/../../data", "/etc"])
def test_an_id_that_is_a_path_names_no_folder(name: str, root: Path) -> None:
    places = [f"{root}/mlruns/{name}/artifacts", f"{Path(f'{root}/mlruns') / name}/artifacts"]
    for place in places:
        assert folders(root, name, place, (name, place.replace("mlruns", "mlruns/models"))) == []
