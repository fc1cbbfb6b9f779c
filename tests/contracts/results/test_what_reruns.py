"""What a change re-runs, according to DVC itself: the real `dvc.yaml` over placeholder outputs."""

from pathlib import Path

import pytest
from dvc.repo import Repo
from projects import ROOT, Project, copy_project

from gradtrail.stages.common.pipeline_file import read_pipeline

PIPELINE = read_pipeline(ROOT / "dvc.yaml")
READERS = {
    section: {name for name, spec in PIPELINE.items() if section in spec.params["params.yaml"]} for section in PIPELINE
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = copy_project(tmp_path_factory.mktemp("real") / "project")
    files = {"data/raw": "images", "data/processed": "train/labels.npy", "models/epochs": "000.safetensors"}
    for spec in PIPELINE.values():
        for out in spec.outs:
            is_folder = not Path(out).suffix
            path = project.folder / out / files.get(out, "figure.png") if is_folder else project.folder / out
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(out)
    for dep in {dep for spec in PIPELINE.values() for dep in spec.deps}:  # the files of outs that stages read
        path = project.folder / dep
        if not path.exists():
            path.write_text(dep)
    project.dvc("commit", "-f")
    return project


def changed(project: Project) -> set[str]:
    """Return the stages that DVC would run for themselves; those below them follow if outs change."""
    with Repo(str(project.folder)) as repo:
        return {stage.rpartition(":")[2] for stage in repo.status()}


@pytest.mark.parametrize("key", ["train.adamw.b1", "runtime.openml"])
def test_key_reruns_the_stages_that_read_its_section(project: Project, key: str) -> None:
    path = project.folder / "params.yaml"
    before = path.read_bytes()
    project.set(key, "changed")
    rerun = changed(project)
    path.write_bytes(before)
    assert rerun == READERS.get(key.split(".")[0], set())


@pytest.mark.parametrize("place", ["core/nn", "tracking"])
def test_new_file_reruns_the_stages_that_are_made_of_its_folder(project: Project, place: str) -> None:
    folder = f"src/gradtrail/{place}"
    (project.folder / folder / "new.py").write_text("NEW = True\n")
    rerun = changed(project)
    (project.folder / folder / "new.py").unlink()
    assert rerun == {name for name, spec in PIPELINE.items() if folder in spec.deps}
