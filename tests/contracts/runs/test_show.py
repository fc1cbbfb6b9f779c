"""`gradtrail show`: what it prints is so."""

from pathlib import Path

import pytest
from projects import Project

from gradtrail.stages.common.files import digest


@pytest.fixture
def project(project: Project) -> Project:
    """A copy whose runs were relocated."""
    project.sync()
    return project


def show(project: Project, *words: str, status: int = 0) -> str:
    return project.gradtrail("show", *words, status=status)


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
    assert output.endswith(f"restore it\n  gradtrail checkout {run['id'][:12]}\n")
    assert "differs from params.yaml" not in output
    project.set("train.adamw.learning_rate", 0.75)
    assert "train.adamw.learning_rate: 0.005, now 0.75" in show(project, run["id"])


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
