"""The pages of `docs/` are true: links lead to the lines that they name, and commands do as they are typed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from projects import ROOT, Project, environment

PAGES = sorted((ROOT / "docs").glob("*.md"))
ORDER = ("tutorial", "optimizers", "runbook", "jax_patterns")
QUICK = {
    "fetch.dataset": "digits",
    "train.epochs": 2,
    "train.keep_epochs": [0, 2],
    "train.mlp.hidden": [16],
    "profile.smallest_batch_size": 32,
    "profile.largest_batch_size": 32,
    "profile.seconds": 0.1,
    "profile.precisions": ["float32"],
    "runtime.system_metrics": False,
}


def commands(page: str) -> list[str]:
    """Return the command lines of a page, in order; a line that ends with a backslash goes on in the next."""
    text = (ROOT / "docs" / f"{page}.md").read_text().replace("\\\n", " ")
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines() if line]


def test_every_page_is_tried() -> None:
    assert {page.stem for page in PAGES} == set(ORDER)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for path in re.findall(r"\]\(([^)#:]+)", page.read_text()):
        assert (page.parent / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_link_to_a_line_leads_to_the_code_that_it_names(page: Path) -> None:
    for code, path, number in re.findall(r"\[`([^`]+)`\]\(([^)#]+)#L(\d+)\)", page.read_text()):
        lines = (page.parent / path).read_text().splitlines()
        found = [place for place, line in enumerate(lines, start=1) if code in line]
        assert int(number) in found, f"{code} stands in {path} at {found}, not at {number}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of everything that is not ignored, set to be quick, with this environment as its `.venv`."""
    project = Project(tmp_path_factory.mktemp("docs") / "project")
    listed = subprocess.run(("git", "ls-files", "-co", "--exclude-standard"), cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (project.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, project.folder / name)
    (project.folder / ".venv").symlink_to(Path(sys.executable).parents[1], target_is_directory=True)
    for key, value in QUICK.items():
        project.set(key, value)
    for name in ("dvc.lock", "metrics"):
        subprocess.run(("rm", "-rf", name), cwd=project.folder, check=True)
    project.git("init", "-q")
    project.run("make", "repro")
    project.run(sys.executable, "-m", "gradtrail", "gate", "--accept")  # of these params
    project.commit("a project")
    return project


@pytest.mark.slow
@pytest.mark.parametrize("page", ORDER)
def test_its_commands_do_as_they_are_typed(page: str, project: Project) -> None:
    """One seed is enough here, where a page leaves the number open."""
    assert commands(page)
    for command in commands(page):
        if command.startswith("make ui"):
            serve(command, project)
        else:
            project.run("bash", "-c", command, env={"SEEDS": "0"})


def serve(command: str, project: Project) -> None:
    """Start a command that serves until it is ended; it says where."""
    process = subprocess.Popen(
        command.split(),
        cwd=project.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout
        deadline = time.monotonic() + 120
        lines = iter(process.stdout.readline, "")
        assert any("viewStateShareKey" in line for line in lines if time.monotonic() < deadline)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
