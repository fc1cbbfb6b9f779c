"""The code stays easy to enter: small modules, small folders. `make check` holds the layers and the parameters."""

from collections import Counter
from pathlib import Path

from projects import ROOT

MODULES = sorted((ROOT / "src").rglob("*.py"))
LONGEST_MODULE, LARGEST_FOLDER = 350, 16


def test_no_module_is_long() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in MODULES}
    assert MODULES
    assert {path: length for path, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_no_folder_has_many_modules() -> None:
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in MODULES if path.name != "__init__.py")
    assert {folder: size for folder, size in sizes.items() if size > LARGEST_FOLDER} == {}


def test_every_folder_of_tests_is_one_of_the_package_or_of_whole_projects() -> None:
    own = {Path(), Path("contracts"), Path("pipeline")}
    package = {path.parent.relative_to(ROOT / "src" / "gradtrail") for path in MODULES}
    benchmarks = {path.parent.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py")}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")}
    assert folders - package - benchmarks - own == set()


def test_make_finds_every_module_with_slow_tests() -> None:
    """It looks for these words, so that no worker imports what it would not run."""
    helpers = {path.name for path in (ROOT / "tests").rglob("*.py") if "mark.slow" in path.read_text()}
    assert {name for name in helpers if not name.startswith("test_")} == {"cases.py"}
    assert r'"mark\.slow\|import cases"' in (ROOT / "Makefile").read_text()
