"""The project's folder is found from any folder in it, as DVC finds it, and nowhere else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from factories import ROOT

from gradtrail.support.errors import UserError
from gradtrail.support.paths import find_project, store_uri


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


def test_the_root_that_dvc_names_may_be_another_project_but_nothing_else(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_ROOT", str(make_project(tmp_path / "root")))
    assert find_project(project) == project
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with pytest.raises(UserError, match=r"^DVC_ROOT: must name a gradtrail repository"):
        find_project(project)


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
    "address",
    [
        "localhost:5000",
        "mlruns",
        "/srv/mlruns",
        "sqlite:///",
        "sqlite:///a.db?timeout=9",
        "http://",
        "ftp://host",
        "http://a b",
    ],
)
def test_store_of_another_form_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with pytest.raises(UserError, match=rf"^MLFLOW_TRACKING_URI: must be [^\n]*; got {re.escape(repr(address))}$"):
        store_uri()


@pytest.mark.parametrize("scheme", ["http", "https", "postgresql"])
@pytest.mark.parametrize("credentials", ["ann:s3cret", "ann:s3/cr@et", "s3cret-token"])
def test_credentials_in_the_address_of_the_store_are_refused_and_not_shown(
    scheme: str, credentials: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{scheme}://{credentials}@host:5000")
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_PASSWORD; got '\*\*\*@host:5000'$") as error:
        store_uri()
    assert not any(part in str(error.value) for part in ("s3", "ann", "et@"))


def test_name_that_python_cannot_read_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "café").mkdir()
    code = "from gradtrail.support.paths import store_uri; store_uri()"
    env = {"PYTHONPATH": str(ROOT / "src"), "LC_ALL": "C", "PYTHONUTF8": "0"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "café", env=env, capture_output=True, text=True, check=False
    )
    line = process.stderr.splitlines()[-1]
    assert line.startswith(
        "gradtrail.support.errors.UserError: PYTHONUTF8: must not be 0 with this locale, as the name of "
    )
