"""DVC and our commands in a clone that lacks something, and in a project that was moved or copied."""

import shutil
from pathlib import Path

import pytest
from projects import ROOT, Project
from ruamel.yaml import YAML

from gradtrail.stages.common.files import digest

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
    comparison = {"about": "?", "seeds": [7], "variants": {"whole": {}, "half": {"train.adamw.learning_rate": 0.5}}}
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
    progress, *refusals = output.splitlines()
    assert progress == "compare: reading the runs in MLflow", output
    assert [line.split(": ")[0] for line in refusals] == ["gradtrail"], output
    assert remedy in output
    if incapable.folder.name == "shallow":
        output = incapable.dvc("exp", "run", "--temp", *HALF, status=255)
        assert f"{incapable.folder}: a shallow clone" in output
        assert remedy in output
        assert "failed to run: sh pipeline/stage.sh train, exited with 2" in output
        incapable.git("fetch", "-q", "--unshallow")
        assert "exited with" not in incapable.dvc("exp", "run", "--temp", "--name", "half", *HALF)
        assert "half" in incapable.dvc("exp", "list")


NAME = "neuer Ordner ü"
DOWNLOAD = """
from pathlib import Path
from gradtrail.stages.common.files import digest
from gradtrail.tracking.store import open_store
client = open_store()
experiments = [found.experiment_id for found in client.search_experiments()]
for run in client.search_runs(experiments):
    print(run.info.run_id, digest(Path(client.download_artifacts(run.info.run_id, ""))))
"""


def downloads(project: Project) -> dict[str, str]:
    """Return the digest of all artifacts of each run, as MLflow gives them."""
    lines = project.python("-c", DOWNLOAD, env={"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}).splitlines()
    return dict(line.split() for line in lines)


@pytest.mark.slow
def test_moved_or_copied_project_works_in_its_new_place(finished: Project, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    project = finished.copy(tmp_path / "old/project")
    project.sync()
    before = downloads(project)
    assert len(before) == 4

    original = digest(project.folder / "mlflow.db"), digest(project.folder / "mlruns")
    copied = project.copy(tmp_path / "copy")
    copied.set("evaluate.calibration_bins", 7)
    output = copied.dvc("repro")  # a stage relocates the artifacts as a sync does
    assert copied.ran(output) == ["evaluate"]
    assert len(downloads(copied)) == 5
    assert (digest(project.folder / "mlflow.db"), digest(project.folder / "mlruns")) == original

    (tmp_path / NAME).mkdir()
    moved = Project(Path(shutil.move(project.folder, tmp_path / NAME)))
    assert moved.sync().splitlines() == [
        f"moved or copied from {project.folder}: the artifacts in MLflow now name {moved.folder}",
        "4 runs present",
    ]
    assert downloads(moved) == before
    assert moved.sync() == "4 runs present\n"
    assert moved.ran(moved.dvc("repro")) == []
    assert not (tmp_path / "old/project").exists()


@pytest.mark.nightly
def test_a_worktree_has_a_store_of_its_own_and_shares_commits_and_cache(finished: Project, tmp_path: Path) -> None:
    project = finished.copy(tmp_path / "project")
    project.sync()
    project.git("worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    side = Project(tmp_path / "side")
    side.dvc("cache", "dir", "--local", str(project.folder / ".dvc/cache"))
    assert "rebuilt: fetch, train, evaluate, gradients" in side.sync()
    assert side.ran(side.dvc("repro")) == []
    side.set("train.adamw.learning_rate", 0.5)
    assert side.ran(side.dvc("repro")) == ["train", "evaluate", "gradients"]
    side.commit("another learning rate")
    assert side.sync() == "7 runs present\n"
    side.dvc("exp", "run", "-S", "evaluate.calibration_bins=7")
    assert side.sync() == "8 runs present\n"
    assert "rebuilt: train, evaluate (2), gradients" in project.sync()
    for repository in (project, side):
        assert "nothing to remove" in repository.gradtrail("gc")
        assert {run["status"] for run in repository.runs()} == {"FINISHED"}
        assert {run["artifacts"].is_relative_to(repository.folder / "mlruns") for run in repository.runs()} == {True}
    assert {run["tags"]["state"] for run in project.runs()} == {run["tags"]["state"] for run in side.runs()}
