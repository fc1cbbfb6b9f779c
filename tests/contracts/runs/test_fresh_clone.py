"""DVC in a clone that lacks the outs of a stage."""

import shutil

import pytest
from projects import ROOT, Project
from ruamel.yaml import YAML

CACHE = ".dvc/cache/files/md5"
PLOTS = YAML(typ="safe", pure=True).load(ROOT / "dvc.yaml")["plots"]
HALF = ("-S", "train.adamw.learning_rate=0.5")


@pytest.mark.slow
def test_an_experiment_needs_no_outs_of_stages_that_it_leaves_out(project: Project) -> None:
    path = project.folder / "dvc.yaml"
    pipeline = YAML().load(path)
    pipeline["stages"]["gradients"]["outs"] = ["results/gradients"]
    YAML().dump(pipeline | {"plots": PLOTS}, path)
    project.git("rm", "-rq", "results/gradients")
    project.dvc("repro")
    project.commit("a folder of results, and the plots of the real pipeline")
    listing = project.digests("results/gradients")["results/gradients"]
    (project.folder / CACHE / listing[:2] / listing[2:]).unlink()
    shutil.rmtree(project.folder / "results/gradients")
    project.dvc("exp", "run", "--name", "half", *HALF, "evaluate")
    assert "half" in project.dvc("exp", "list")
