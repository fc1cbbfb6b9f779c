"""The size of the packages, where a module lies, and what may import what. `make check` holds the layers."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grimp
import pytest
from projects import ROOT

from gradtrail.stages.common.pipeline_file import read_pipelines

CORE_IMPORTS = {"jax", "flax", "optax", "numpy", "jaxtyping"}


@dataclass(frozen=True)
class Budget:
    """A limit of size.

    `is_reached` is set when the size first is within the limit; from then on the limit holds.
    """

    limit: int
    is_reached: bool = False


# Lines with docstrings, comments and blanks. What is over its limit is to become smaller, never larger limits.
BUDGETS = {
    "src/gradtrail/core": Budget(5_700),
    "src/gradtrail/stages": Budget(5_800),
    "pipeline": Budget(480),
    "src/gradtrail/tracking": Budget(3_000),
    "src/gradtrail/experiments": Budget(2_500),
    "src/gradtrail/serving": Budget(3_000),
    "src/gradtrail/cluster": Budget(900, is_reached=True),
    "support and cli": Budget(1_050),
    "tests": Budget(22_000),
    "docs (words)": Budget(26_000, is_reached=True),
    "docs (pages)": Budget(25, is_reached=True),
    "README.md": Budget(100, is_reached=True),
    "root (entries)": Budget(24, is_reached=True),
    "locks (bytes)": Budget(450_000, is_reached=True),
}
Sizes: TypeAlias = dict[str, int]


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    """Return the size of everything that has a budget."""
    return {name: measure(name) for name in BUDGETS}


def measure(name: str) -> int:
    """Return the size of a budget's subject: lines, unless its name has another unit."""
    match name:
        case "support and cli":
            package = ROOT / "src/gradtrail"
            return sum(num_lines(path) for path in [*package.glob("*.py"), *(package / "support").rglob("*.py")])
        case "docs (words)":
            return sum(len(path.read_text().split()) for path in pages())
        case "docs (pages)":
            return len(pages())
        case "root (entries)":
            return len({path.split("/")[0] for path in tracked_files()})
        case "locks (bytes)":
            return sum(path.stat().st_size for path in (ROOT / "locks").glob("*.lock"))
    path = ROOT / name
    return num_lines(path) if path.is_file() else sum(num_lines(module) for module in path.rglob("*.py"))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def pages() -> list[Path]:
    return sorted((ROOT / "docs").glob("*.md"))


def tracked_files() -> list[str]:
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("name", BUDGETS)
def test_size_is_within_its_budget_once_it_was(name: str, sizes: Sizes) -> None:
    budget, size = BUDGETS[name], sizes[name]
    table = "\n".join(f"{key:28}{sizes[key]:10,} of {one.limit:10,}" for key, one in BUDGETS.items())
    if budget.is_reached:
        assert size <= budget.limit, f"{name} is over its budget\n{table}"
    else:
        assert size > budget.limit, f"{name} is within its budget: set is_reached\n{table}"


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Return the imports of the package and of the stages' scripts."""
    return grimp.build_graph("gradtrail", "pipeline", include_external_packages=True, cache_dir=None)


def test_core_imports_five_packages_and_the_standard_library(graph: grimp.ImportGraph) -> None:
    """A machine with an accelerator may have no other ones."""
    core = {"gradtrail.core", *graph.find_descendants("gradtrail.core")}
    imported = {target for module in core for target in graph.find_modules_directly_imported_by(module)}
    packages = {target.partition(".")[0] for target in imported} - {"gradtrail"}
    assert packages - sys.stdlib_module_names == CORE_IMPORTS


def test_no_stage_imports_another(graph: grimp.ImportGraph) -> None:
    stages = {f"gradtrail.stages.{name}" for name in read_pipelines(ROOT)}
    imports = {
        (module, target)
        for stage in stages & graph.modules
        for module in {stage, *graph.find_descendants(stage)}
        for target in graph.find_modules_directly_imported_by(module)
    }
    folders = {(folder(module, depth=3), folder(target, depth=3)) for module, target in imports}
    assert {pair for pair in folders if pair[0] != pair[1] and pair[1] in stages} == set()


def test_module_lies_where_its_readers_meet(graph: grimp.ImportGraph) -> None:
    """A module that only one other folder of its layer imports belongs into that folder."""
    assert dict(misplaced_modules(graph)) == {}


def misplaced_modules(graph: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    """Yield each module that lies elsewhere, with the folder that it belongs into."""
    packages = {folder(module) for module in graph.modules}
    for module in sorted(graph.modules - packages):
        readers = graph.find_modules_that_directly_import(module)
        if not module.startswith("gradtrail.") or not readers:
            continue
        meeting = nearest_common_folder(readers)
        is_in_layer = f"{meeting}.".startswith(f"{folder(module, depth=2)}.")
        if is_in_layer and not f"{folder(module)}.".startswith(f"{meeting}."):
            yield module, meeting


def folder(module: str, depth: int | None = None) -> str:
    """Return the package of a module, or its first `depth` parts."""
    return ".".join(module.split(".")[:depth]) if depth else module.rpartition(".")[0]


def nearest_common_folder(modules: set[str]) -> str:
    common: list[str] = []
    for parts in zip(*(folder(module).split(".") for module in modules), strict=False):
        if len({*parts}) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def test_misplaced_module_is_noticed() -> None:
    graph = grimp.ImportGraph()
    modules = ("gradtrail", "gradtrail.a", "gradtrail.a.b", "gradtrail.a.c", "gradtrail.a.b.used", "gradtrail.a.c.main")
    for name in modules:
        graph.add_module(name)
    graph.add_import(importer="gradtrail.a.c.main", imported="gradtrail.a.b.used")
    assert dict(misplaced_modules(graph)) == {"gradtrail.a.b.used": "gradtrail.a.c"}


def test_every_folder_of_tests_is_one_of_the_package_or_of_whole_projects() -> None:
    contracts = {Path("contracts", name) for name in (".", "repository", "results", "runs")}
    own = {Path(), Path("pipeline"), *contracts}
    package = {path.parent.relative_to(ROOT / "src" / "gradtrail") for path in (ROOT / "src").rglob("*.py")}
    benchmarks = {path.parent.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py")}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")}
    assert folders - package - benchmarks - own == set()
