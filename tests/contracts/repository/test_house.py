"""The size of the packages, where a module lies, and what may import what. `make check` holds the layers."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import grimp
import pytest
from projects import ROOT

from gradtrail.stages.common.pipeline_file import read_pipelines

CORE_IMPORTS = {"jax", "flax", "optax", "numpy", "jaxtyping"}


# name → recorded size, budget. Sizes are lines with docstrings, comments and blanks, unless the name has another unit.
# A size above its budget may only fall: when it has, record the smaller one; the failing test prints all sizes.
BUDGETS = {
    "src/gradtrail/core": (8_165, 6_600),
    "src/gradtrail/stages": (8_407, 6_600),
    "pipeline": (609, 560),
    "src/gradtrail/tracking": (4_791, 3_200),
    "src/gradtrail/experiments": (4_598, 3_000),
    "src/gradtrail/serving": (3_466, 3_050),
    "src/gradtrail/cluster": (877, 800),
    "support, cli, launch": (1_374, 1_200),
    "src + pipeline": (32_287, 25_000),
    "tests": (35_346, 24_000),
    "benchmarks": (5_308, 4_400),
    "docs (words)": (25_975, 26_000),
    "docs (pages)": (25, 25),
    "README.md": (93, 100),
    "root (tracked entries)": (24, 24),
    "locks (bytes)": (411_354, 450_000),
}


def python_files(folder: str) -> list[Path]:
    """Return the modules below a folder, without the networks that people add."""
    return [path for path in (ROOT / folder).rglob("*.py") if path.parent != ROOT / "pipeline" / "networks"]


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def measure(name: str) -> int:
    """Return the size that has a budget."""
    pages = [*(ROOT / "docs").glob("*.md")]
    match name:
        case "support, cli, launch":
            return num_lines([*(ROOT / "src/gradtrail").glob("*.py"), *python_files("src/gradtrail/support")])
        case "docs (words)":
            return sum(len(path.read_text().split()) for path in pages)
        case "docs (pages)":
            return len(pages)
        case "README.md":
            return num_lines([ROOT / name])
        case "root (tracked entries)":
            files = subprocess.check_output(("git", "ls-files"), cwd=ROOT, text=True).splitlines()
            return len({path.split("/")[0] for path in files})
        case "locks (bytes)":
            return sum(path.stat().st_size for path in (ROOT / "locks").glob("*.lock"))
    return num_lines(path for folder in name.split(" + ") for path in python_files(folder))


def as_table(sizes: Mapping[str, int]) -> str:
    """Return the lines of `BUDGETS` with these sizes as the recorded ones."""
    return "\n".join(f'    "{name}": ({sizes[name]:_}, {budget:_}),' for name, (_, budget) in BUDGETS.items())


def fault_of(size: int, recorded: int, budget: int) -> str | None:
    """Return what is wrong with a size, or None."""
    if size > max(recorded, budget):
        return f"{size:,} is more than {max(recorded, budget):,}"
    if recorded > budget and size < 0.99 * recorded:
        return f"{size:,} is less than the recorded {recorded:,}: record it"
    return None


def test_sizes_are_within_their_budgets_or_fall() -> None:
    sizes = {name: measure(name) for name in BUDGETS}
    faults = {name: fault for name, limits in BUDGETS.items() if (fault := fault_of(sizes[name], *limits))}
    assert not faults, f"{faults}\n{as_table(sizes)}"


@pytest.mark.parametrize(("recorded", "allowed"), [(120, range(119, 121)), (101, range(100, 102)), (70, range(101))])
def test_size_may_only_fall_to_its_budget(recorded: int, allowed: range) -> None:
    assert [size for size in range(130) if not fault_of(size, recorded, budget=100)] == [*allowed]


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
    own = {Path(), Path("pipeline"), Path("support_code"), *contracts}
    package = {path.parent.relative_to(ROOT / "src" / "gradtrail") for path in (ROOT / "src").rglob("*.py")}
    benchmarks = {path.parent.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py")}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")}
    assert folders - package - benchmarks - own == set()


if __name__ == "__main__":
    print(as_table({name: measure(name) for name in BUDGETS}))
