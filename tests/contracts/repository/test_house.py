"""The size of the packages, and what core and stages may import. `make check` holds the layers."""

import itertools
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp
import pytest
from projects import ROOT

from gradtrail.stages.common.pipeline_file import read_pipelines

CORE_IMPORTS = {"jax", "flax", "optax", "numpy", "jaxtyping"}


# name → recorded size, budget. Sizes are lines with docstrings, comments and blanks, unless the name has another unit.
# A size above its budget may only fall: when it has, record the smaller one; the failing test prints all sizes.
BUDGETS = {
    "src/gradtrail/core": (8_435, 6_600),
    "src/gradtrail/stages": (8_166, 6_600),
    "pipeline": (536, 560),
    "src/gradtrail/tracking": (5_021, 3_200),
    "src/gradtrail/experiments": (4_204, 3_000),
    "src/gradtrail/serving": (3_615, 3_050),
    "src/gradtrail/cluster": (888, 800),
    "support, cli, launch": (1_558, 1_200),
    "src + pipeline": (32_423, 25_000),
    "tests": (34_909, 24_000),
    "benchmarks": (4_694, 4_400),
    "docs (words)": (25_977, 26_000),
    "docs (pages)": (27, 25),
    "README.md": (90, 100),
    "root (tracked entries)": (25, 24),
    "locks (bytes)": (417_553, 450_000),
}


def python_files(folder: str) -> list[Path]:
    """Return the modules below a folder, without the networks that people add."""
    return [path for path in (ROOT / folder).rglob("*.py") if path.parent != ROOT / "pipeline" / "networks"]


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def measure(name: str) -> int:
    """Return the size that has a budget."""
    pages = [*(ROOT / "docs").rglob("*.md")]
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
    stages = {f"gradtrail.stages.{name}" for name in read_pipelines(ROOT)} & graph.modules
    pairs = itertools.permutations(sorted(stages), 2)
    assert [
        pair for pair in pairs if graph.direct_import_exists(importer=pair[0], imported=pair[1], as_packages=True)
    ] == []


if __name__ == "__main__":
    print(as_table({name: measure(name) for name in BUDGETS}))
