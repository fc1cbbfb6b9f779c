"""`gradtrail show`: what it prints is so, and the commands that it gives restore exactly the state."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from projects import Project

from gradtrail.stages.common.files import digest

LR, CLIP = "train.adamw.learning_rate", "train.clip_norm"
WEIGHTS = "models/final.safetensors"
OUTS = (WEIGHTS, "results/evaluate/words.txt", "results/gradients/words.txt")


@pytest.fixture
def project(project: Project) -> Project:
    """A copy whose runs were relocated."""
    project.sync()
    return project


def show(project: Project, *words: str, status: int = 0) -> str:
    return project.gradtrail("show", *words, status=status)


def commands(output: str) -> list[str]:
    """Return what a person would type, one line a way."""
    lines = output.partition("restore it\n")[2].splitlines()
    return [line.partition("#")[0].strip() for line in lines]


def digests(project: Project) -> dict[str, str]:
    return {out: digest(project.folder / out) for out in OUTS}


def of_learning_rate(project: Project, value: str) -> dict[str, Any]:
    (run,) = (run for run in project.runs_of("train") if run["params"][LR] == value)
    return run


def test_the_chain_goes_down_to_the_raw_data(project: Project) -> None:
    run = project.runs_of("evaluate")[0]
    output = show(project, run["id"])
    assert output == show(project, run["tags"]["state"][:10]) == show(project, "results/evaluate/words.txt")
    for path in ("results/evaluate/words.txt", "models/final.safetensors", "data/words.txt"):
        assert f"{path}  {digest(project.folder / path)}" in output
    for stage in ("evaluate", "train", "fetch"):
        (made,) = project.runs_of(stage)
        assert f"{stage}  state {made['tags']['state'][:12]}  run {made['id'][:12]}" in output
    assert run["tags"]["mlflow.source.git.commit"] in output
    assert "# nothing to do: the working folder has it" in output
    assert "differs from params.yaml" not in output


@pytest.mark.slow
def test_unknown_name_is_an_error_of_one_line(project: Project, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("of nobody")
    for name, message in (("nobody", "no run has this name"), (str(tmp_path / "other.txt"), "no run wrote")):
        (line,) = show(project, name, status=2).splitlines()
        assert message in line


@pytest.mark.slow
def test_several_runs_are_listed_to_choose_from(project: Project) -> None:
    script = project.folder / "pipeline/evaluate.py"
    script.write_text(f"{script.read_text()}# another state of the same name\n")
    project.dvc("repro")
    names = {run["id"]: run["name"] for run in project.runs_of("evaluate")}
    ids, (name,) = set(names), set(names.values())
    listed = show(project, name, status=2)
    assert listed.startswith(f"{name}: 2 runs; which one?")
    for line in listed.splitlines()[1:]:
        output = project.run("sh", "-c", line.partition("   ")[0], env={"PYTHONPATH": str(project.folder / "src")})
        assert {run for run in ids if run in output} == {run for run in ids if run[:12] in line}


@pytest.mark.slow
def test_a_commit_is_restored_and_local_changes_are_stashed(project: Project) -> None:
    before, run = digests(project)[WEIGHTS], of_learning_rate(project, "0.005")
    elsewhere = shutil.copy(project.folder / WEIGHTS, project.folder.parent / "a copy")
    project.set(LR, 0.5)
    project.dvc("repro")
    project.commit("another learning rate")
    project.set(LR, 0.75)
    project.dvc("repro")
    output = show(project, str(elsewhere))
    assert f"{LR}: 0.005, now 0.75" in output
    assert run["tags"]["state"] in output
    (command,) = commands(output)
    assert command.startswith("git stash --include-untracked && git checkout ")
    project.run("sh", "-c", command)
    assert digests(project)[WEIGHTS] == before
    assert "# nothing to do" in show(project, run["id"])
    assert project.ran(project.dvc("repro")) == []


@pytest.mark.slow
def test_state_without_a_cache_is_reproduced(project: Project, tmp_path: Path) -> None:
    before, run = digests(project), of_learning_rate(project, "0.005")
    shutil.rmtree(project.folder / ".dvc/cache")
    shutil.rmtree(project.folder / "models")
    (command,) = commands(show(project, run["id"]))
    assert command == "dvc repro train"
    project.run("sh", "-c", command)
    assert digests(project) == before
    project.dvc("remote", "add", "--local", "far", str(tmp_path))
    shutil.rmtree(project.folder / "models")
    assert commands(show(project, run["id"])) == ["dvc repro --pull train"]


@pytest.mark.nightly
def test_an_experiment_is_restored(project: Project) -> None:
    before = digests(project)
    project.dvc("exp", "run", "--temp", "-S", f"{LR}=0.5", "--name", "higher")
    project.git("checkout", "-q", ".")
    project.dvc("checkout")
    run = of_learning_rate(project, "0.5")
    assert run["tags"]["dvc.exp_name"] == "higher"
    assert run["tags"]["dvc.exp_baseline"] == project.git("rev-parse", "HEAD").strip()
    for name in (run["tags"]["state"], run["id"][:8], "higher"):
        assert commands(show(project, name)) == ["dvc exp apply higher"]
    project.run("sh", "-c", "dvc exp apply higher")
    assert digests(project)[WEIGHTS] == run["outs"][WEIGHTS]
    assert digests(project)[WEIGHTS] != before[WEIGHTS]


@pytest.mark.nightly
def test_state_in_no_lock_is_reproduced(project: Project) -> None:
    """From the commit and its diff."""
    project.set(LR, 0.5)
    source = project.folder / "src/gradtrail/core/third.py"
    source.write_text(source.read_text().replace("third", "third of another kind"))
    (project.folder / "notes.txt").write_text("of no importance")
    project.dvc("repro")
    before, run = digests(project), project.runs_of("evaluate")[0]
    assert run["tags"]["git.dirty"] == "true"
    project.git("checkout", "-q", ".")
    project.dvc("checkout")
    assert digests(project) != before
    shutil.rmtree(project.folder / ".dvc/cache/runs")
    (command,) = commands(show(project, run["tags"]["state"]))
    assert "&& git apply .gradtrail/restore/git.diff && dvc repro evaluate" in command
    project.run("sh", "-c", command)
    assert digests(project)["results/evaluate/words.txt"] == before["results/evaluate/words.txt"]
    assert "another kind" in (project.folder / "results/evaluate/words.txt").read_text()
