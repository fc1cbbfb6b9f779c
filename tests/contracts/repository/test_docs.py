"""README and the pages of `docs/` are true: links resolve, names exist, and commands work as they are typed."""

import functools
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from projects import ROOT, Project
from ruamel.yaml import YAML

from gradtrail import cli
from gradtrail.stages.common.params import flatten, read_params
from gradtrail.stages.common.pipeline_file import read_pipeline

README = ROOT / "README.md"
SKILLS = sorted((ROOT / "docs" / "skills").glob("*/SKILL.md"))
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), *SKILLS]
STAGES = tuple(read_pipeline(ROOT / "dvc.yaml"))
FILE_ENDINGS = {"py", "json", "npz", "parquet", "html", "j2", "safetensors", "csv", "md", "png", "yaml"}
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

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page: Path, language: str = "[a-z]*") -> str:
    """Return the code blocks of a page; a line that ends with a backslash is continued."""
    matches = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return "".join(matches).replace("\\\n", " ")


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def code(page: Path) -> list[str]:
    """Return what a page shows as code: the inline spans, and the lines of the blocks that are no Python."""
    return [*re.findall(r"`([^`\n]+)`", prose(page)), *blocks(page, "(?!python)[a-z]*").splitlines()]


def commands(page: Path) -> list[str]:
    """Return the command lines that a page has a reader type, in order; in README every code block is of these."""
    return [line for line in blocks(page, "(?:sh)?" if page == README else "sh").splitlines() if line]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def linked_pages(page: Path) -> set[Path]:
    return {(page.parent / path).resolve() for path in re.findall(r"\]\(([^):#\s]+\.md)[#)]", prose(page))}


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    assert linked_pages(index) | {index} >= set(PAGES)


def test_every_page_is_in_the_navigation_and_two_clicks_from_the_front_page() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    nav = YAML(typ="safe", pure=True).load(ROOT / "deploy" / "mkdocs.yml")["nav"]
    sections = [[entry] if isinstance(entry, str) else next(iter(entry.values())) for entry in nav]
    assert sorted(itertools.chain(*sections)) == sorted(pages)
    first_click = linked_pages(README)
    second_click = set[Path]().union(*map(linked_pages, first_click))
    assert {ROOT / "docs" / page for page in pages} - first_click - second_click == set()


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)
def test_skill_begins_with_its_name_and_when_to_use_it(skill: Path) -> None:
    """As agents expect it: at most 64 and 1,024 characters, the name of the folder, and no other key."""
    _, front_matter, _ = skill.read_text().split("---\n", 2)
    about = YAML(typ="safe", pure=True).load(front_matter)
    assert about.keys() == {"name", "description"}
    assert about["name"] == skill.parent.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", about["name"])
    assert "Use when" in about["description"]
    assert len(about["description"]) <= 1024


@pytest.mark.slow
def test_make_docs_fails_on_a_warning(tmp_path: Path) -> None:
    for name in ("Makefile", "deploy/mkdocs.yml", "deploy/mkdocs_links.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "unlisted.md").write_text("[nothing](nothing.md)\n")
    (tmp_path / "docs" / "tutorial.md").unlink()
    make = ("make", "--old-file=env", "docs", f"VENV={sys.prefix}")
    done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode, done.stdout
    assert all(name in done.stdout for name in ("unlisted.md", "nothing.md", "tutorial.md")), done.stdout


@each_page
def test_quoted_code_occurs_once_in_the_linked_file(page: Path) -> None:
    for quote, path in re.findall(r"\[`([^`]+)`\]\(([^)#]+\.py)\)", page.read_text()):
        if not path.endswith(quote):  # else it is the name of the file
            assert (page.parent / path).read_text().count(quote) == 1, f"{quote} in {path}"


def test_the_network_of_the_page_is_the_file_that_trains() -> None:
    network = (ROOT / "pipeline" / "networks" / "transformer.py").read_text()
    assert blocks(ROOT / "docs" / "own_network.md", "python") == network


@functools.cache
def param_keys() -> frozenset[str]:
    """Return all keys of the params files, those of blocks included."""
    parts = [key.split(".") for key in flatten(read_params(ROOT))]
    return frozenset(".".join(key[:length]) for key in parts for length in range(1, len(key) + 1))


def params_in(text: str) -> Iterator[str]:
    """Yield the names of params in a line of code: `train.seed`, but neither `train.py` nor `a.train.b`."""
    sections = "|".join(read_params(ROOT))
    for name in re.findall(rf"(?<![\w./-])((?:{sections})(?:\.[a-z]\w*)+)(?![\w/(])", text):
        if name.rpartition(".")[2] not in FILE_ENDINGS:
            yield name


@each_page
def test_params_exist(page: Path) -> None:
    for text in code(page):
        for name in params_in(text):
            assert name in param_keys(), f"{name} in `{text}`"


@each_page
def test_commands_and_their_flags_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    verbs = cli.gradtrail.commands
    for text in code(page):
        line = re.sub(r"\s#.*", "", text)
        for words in re.findall(r"(?:^|[\s/])gradtrail ([a-z][^&|;$]*)", line):
            verb, *rest = words.split()
            assert verb in verbs, text
            options = {"--help", *(name for param in verbs[verb].params for name in param.opts)}
            if verb != "repro":  # which passes them on to DVC
                assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= options, text
        for words in re.findall(r"^make ([^&|;]+)", line):
            assert {word for word in words.split() if "=" not in word} <= targets, text


@each_page
def test_metrics_exist(page: Path) -> None:
    """`test_metrics_page.py` compares the page of metrics with the code."""
    defined = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    outs = {out for stage in read_pipeline(ROOT / "dvc.yaml").values() for out in stage.outs}
    groups = {name.partition("/")[0] for name in defined if re.fullmatch(r"\w+/\w+", name)}
    name = rf"(?:{'|'.join(groups)})(?:/(?:<\w+>|\w+))*/[a-z]\w+"
    assert {text for text in code(page) if re.fullmatch(name, text)} <= defined | outs


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of everything that is not ignored, set to be quick, with the packages of this environment."""
    project = Project(tmp_path_factory.mktemp("docs") / "project")
    listed = subprocess.run(("git", "ls-files", "-co", "--exclude-standard"), cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (project.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, project.folder / name)
    lend_environment(project.folder / ".venv")
    project.change(QUICK)
    for name in ("dvc.lock", "results"):
        subprocess.run(("rm", "-rf", name), cwd=project.folder, check=True)
    project.git("init", "-q")
    project.run("make", "repro", env=own_code(project))
    project.run(sys.executable, "-m", "gradtrail", "gate", "--accept", env=own_code(project))  # of these params
    project.commit("a project")
    return project


def lend_environment(folder: Path) -> None:
    """Make a `.venv` of links to this environment that make takes as it is; it would install into one whole link."""
    folder.mkdir()
    for path in Path(sys.executable).parents[1].iterdir():
        if path.name != ".ready":
            (folder / path.name).symlink_to(path)
    (folder / ".ready").write_text(f"{folder.resolve()}\nlocks/base.lock\n")


def own_code(project: Project) -> dict[str, str]:
    """Return what makes commands use the project's code, whichever clone the environment was installed from."""
    return {"PYTHONPATH": str(project.folder / "src")}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "page",
    sorted((page for page in PAGES if commands(page)), key=lambda page: page.stem not in ("README", "tutorial")),
    ids=lambda page: page.stem,
)
def test_commands_of_the_page_work(page: Path, project: Project, tmp_path: Path) -> None:
    """In a pipe, one after the other. One seed is enough here, where a page leaves the number open."""
    project.git("checkout", "-q", ".")  # what another page left
    project.dvc("checkout", "dvc.yaml")
    for line in commands(page):
        command = line.replace("ADDRESS gradtrail && cd gradtrail", f". {tmp_path}/gradtrail")
        if command.startswith(("make test", "make ui")):  # of which this is one; served without end
            continue
        if "dvc queue start" in command:  # its workers inherit the output, and a pipe would wait for the last of them
            project.run("bash", "-c", f"({command}) > /dev/null 2>&1", env=own_code(project))
            status = project.wait_for_queue(seconds=1800)
            assert not any(state in status for state in ("Failed", "Queued", "Running")), status
        else:
            project.run("bash", "-c", command, env={"SEEDS": "0"} | own_code(project))
