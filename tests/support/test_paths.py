"""The project's folder is found from any folder in it, as DVC finds it, and nowhere else."""

import re
from pathlib import Path

import pytest

from gradtrail.support.errors import UserError
from gradtrail.support.paths import find_project, same_command, store_uri


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return make_project(tmp_path / "project")


def make_project(folder: Path) -> Path:
    for part in (".dvc", "src/gradtrail", "docs/images"):
        (folder / part).mkdir(parents=True)
    (folder / "dvc.yaml").touch()
    return folder


def test_project_is_the_nearest_folder_at_or_above_and_nowhere_else(project: Path) -> None:
    inner = make_project(project / ".dvc" / "tmp" / "exps" / "copy")
    assert {find_project(folder) for folder in (project, project / "docs", project / "docs" / "images")} == {project}
    assert find_project(inner / "docs") == inner
    other = project / "docs" / "other"  # under DVC, but another project
    (other / ".dvc").mkdir(parents=True)
    (other / "dvc.yaml").touch()
    for folder in (project.parent, other):
        with pytest.raises(UserError, match=rf"^{folder}: not inside a gradtrail repository"):
            find_project(folder)


def test_stage_in_a_copy_is_repeated_as_an_experiment(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    assert same_command() == "`dvc repro`"
    monkeypatch.setenv("DVC_ROOT", str(project))
    assert same_command() == "`dvc repro`"
    monkeypatch.chdir(project / "docs")
    assert same_command() == "`dvc exp run` with the same options"


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("", "sqlite:///{root}/mlflow.db"),
        ("sqlite:///runs.db", "sqlite:///{root}/runs.db"),
        ("sqlite:////srv/runs.db", "sqlite:////srv/runs.db"),
        ("http://host:5000/", "http://host:5000"),
        ("https://host/mlflow", "https://host/mlflow"),
    ],
)
def test_store_is_the_same_in_every_copy_of_the_repository(
    uri: str, address: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("DVC_ROOT", str(project))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert store_uri() == address.format(root=project)


@pytest.mark.parametrize(
    "address", ["localhost:5000", "/srv/mlruns", "sqlite:///", "sqlite:///a.db?timeout=9", "http://", "ftp://host"]
)
def test_store_of_another_form_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with pytest.raises(UserError, match=rf"^MLFLOW_TRACKING_URI: must be [^\n]*; got {re.escape(repr(address))}$"):
        store_uri()


@pytest.mark.parametrize("scheme", ["http", "postgresql"])
@pytest.mark.parametrize("credentials", ["ann:s3cret", "ann:s3/cr@et", "s3cret-token"])
def test_credentials_in_the_address_of_the_store_are_refused_and_not_shown(
    scheme: str, credentials: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{scheme}://{credentials}@host:5000")
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_PASSWORD; got '\*\*\*@host:5000'$") as error:
        store_uri()
    assert not any(part in str(error.value) for part in ("s3", "ann", "et@"))
