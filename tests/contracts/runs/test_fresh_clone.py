"""DVC and our commands in a clone that lacks something: the outs of a stage, an optional pipeline, its history."""

import shutil
from pathlib import Path

import pytest
from projects import ROOT, Project
from ruamel.yaml import YAML

CACHE = ".dvc/cache/files/md5"
PLOTS = YAML(typ="safe", pure=True).load(ROOT / "dvc.yaml")["plots"]
HALF = ("-S", "train.adamw.learning_rate=0.5")
OPTIONAL = "pipeline/audit/dvc.yaml"


@pytest.mark.slow
def test_an_experiment_needs_no_outs_of_stages_that_it_leaves_out(project: Project) -> None:
    path = project.folder / "dvc.yaml"
    pipeline = YAML().load(path)
    pipeline["stages"]["gradients"]["outs"] = ["results/gradients"]
    YAML().dump(pipeline | {"plots": PLOTS}, path)
    project.dvc("repro")
    project.commit("a folder of results, and the plots of the real pipeline")
    listing = project.digests("results/gradients")["results/gradients"]
    (project.folder / CACHE / listing[:2] / listing[2:]).unlink()
    shutil.rmtree(project.folder / "results/gradients")
    project.dvc("exp", "run", "--name", "half", *HALF, "evaluate")
    assert "half" in project.dvc("exp", "list")


def write_optional(project: Project, command: str) -> None:
    """Write an optional pipeline of one stage beside the real one for private trainings."""
    stage = {"wdir": "../..", "cmd": command, "deps": ["data/words.txt"], "outs": ["results/audit.txt"]}
    YAML().dump({"stages": {"audit": stage}}, project.folder / OPTIONAL)


@pytest.mark.slow
def test_dvc_asks_for_outs_of_an_optional_pipeline_only_after_it_ran(project: Project, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("dvc.lock", ".dvcignore")
    shutil.copytree(ROOT / "pipeline" / "audit", project.folder / "pipeline" / "audit", ignore=ignored)
    write_optional(project, "false")
    project.set("runtime.tracking", False)
    project.dvc("remote", "add", "--default", "storage", str(tmp_path / "remote"))
    project.commit("optional pipelines")

    def check_bare_commands() -> None:
        for command in ("push", "fetch", "pull", "checkout"):
            project.dvc(command)
        assert project.dvc("status") == "Data and pipelines are up to date.\n"

    check_bare_commands()
    assert "WARNING" not in project.dvc("exp", "run", "--name", "half", *HALF)
    project.git("checkout", "-q", ".")
    project.dvc("exp", "apply", "half")
    project.git("checkout", "-q", ".")
    project.dvc("checkout")
    assert "failed to run: false" in project.gradtrail("repro", OPTIONAL, status=255)
    check_bare_commands()
    write_optional(project, "mkdir -p results && cp data/words.txt results/audit.txt")
    assert project.ran(project.gradtrail("repro", OPTIONAL)) == [f"{OPTIONAL}:audit"]
    check_bare_commands()
    (project.folder / "results/audit.txt").unlink()
    project.dvc("checkout")
    assert (project.folder / "results/audit.txt").exists()
    for name in ("pipeline/audit/dvc.lock", "pipeline/audit/.dvcignore", "results/audit.txt"):
        (project.folder / name).unlink()
    assert "is cached - skipping run" in project.gradtrail("repro", OPTIONAL)
    assert (project.folder / "results/audit.txt").exists()


@pytest.fixture(params=["shallow", "köln"])
def incapable(request: pytest.FixtureRequest, project: Project, tmp_path: Path) -> Project:
    """A clone in which DVC loses experiments of its queue and of `--temp`, or cannot run them."""
    comparison = {"about": "?", "seeds": [0], "variants": {"whole": {}, "half": {"train.adamw.learning_rate": 0.5}}}
    YAML().dump({"rates": comparison}, project.folder / "experiments.yaml")
    project.commit("experiments")
    depth = ("--depth", "1") if request.param == "shallow" else ()
    project.git("clone", "-q", *depth, f"file://{project.folder}", str(tmp_path / request.param))
    clone = Project(tmp_path / request.param)
    shutil.copytree(project.folder / ".dvc/cache", clone.folder / ".dvc/cache")
    return clone


@pytest.mark.slow
def test_experiments_are_refused_where_dvc_would_not_keep_them(incapable: Project) -> None:
    remedy = {"shallow": "`git fetch --unshallow`", "köln": "`dvc cache dir --local PATH`"}[incapable.folder.name]
    output = incapable.gradtrail("compare", "rates", status=2)
    assert len(output.splitlines()) == 1, output
    assert output.startswith("gradtrail: ")
    assert remedy in output
    if incapable.folder.name == "shallow":
        output = incapable.dvc("exp", "run", "--temp", *HALF, status=255)
        assert f"{incapable.folder}: a shallow clone" in output
        assert remedy in output
        assert "failed to run: sh pipeline/stage.sh train, exited with 2" in output
        incapable.git("fetch", "-q", "--unshallow")
        assert "exited with" not in incapable.dvc("exp", "run", "--temp", "--name", "half", *HALF)
        assert "half" in incapable.dvc("exp", "list")
