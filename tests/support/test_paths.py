"""The project's folder is found from any folder in it, as DVC finds it, and nowhere else."""

from pathlib import Path

import pytest

from gradtrail.support.errors import UserError
from gradtrail.support.paths import find_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return make_project(tmp_path / "project")


def make_project(folder: Path) -> Path:
    for part in (".dvc", "src/gradtrail", "docs/images"):
        (folder / part).mkdir(parents=True)
    (folder / "dvc.yaml").touch()
    return folder


def test_it_is_the_nearest_one_at_or_above(project: Path) -> None:
    inner = make_project(project / ".dvc" / "tmp" / "exps" / "copy")
    assert {find_project(folder) for folder in (project, project / "docs", project / "docs" / "images")} == {project}
    assert find_project(inner / "docs") == inner


def test_elsewhere_there_is_none(project: Path) -> None:
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
