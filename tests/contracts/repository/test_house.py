"""What core may import, and where tests lie. `make check` holds the layers and the parameters."""

import sys
from pathlib import Path

import grimp
from projects import ROOT

MODULES = sorted((ROOT / "src").rglob("*.py"))
CORE_IMPORTS = {"jax", "flax", "optax", "numpy", "jaxtyping"}


def test_core_imports_five_packages_and_the_standard_library() -> None:
    """An accelerator's machine may have no other ones."""
    graph = grimp.build_graph("gradtrail", include_external_packages=True, cache_dir=None)
    core = {"gradtrail.core", *graph.find_descendants("gradtrail.core")}
    imported = {found for module in core for found in graph.find_modules_directly_imported_by(module)}
    outside = {found.partition(".")[0] for found in imported} - {"gradtrail"}
    assert outside - sys.stdlib_module_names == CORE_IMPORTS


def test_every_folder_of_tests_is_one_of_the_package_or_of_whole_projects() -> None:
    contracts = {Path("contracts", name) for name in (".", "repository", "results", "runs")}
    own = {Path(), Path("pipeline"), *contracts}
    package = {path.parent.relative_to(ROOT / "src" / "gradtrail") for path in MODULES}
    benchmarks = {path.parent.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py")}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")}
    assert folders - package - benchmarks - own == set()


def test_make_finds_every_module_with_slow_tests() -> None:
    """It looks for these words, so that no worker imports what it would not run."""
    helpers = {path.name for path in (ROOT / "tests").rglob("*.py") if "mark.slow" in path.read_text()}
    assert {name for name in helpers if not name.startswith("test_")} == {"cases.py"}
    assert r'"mark\.slow\|import cases"' in (ROOT / "Makefile").read_text()
