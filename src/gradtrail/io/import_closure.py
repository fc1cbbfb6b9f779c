"""Which files of the project a script imports, directly or not: read from the source, so that late imports count."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def import_closure(script: Path, root: Path, *, stop_at: frozenset[str] = frozenset()) -> set[str]:
    """Return the script and all files of the package that it reaches, relative to a folder that holds them.

    Modules in `stop_at` are neither listed nor followed. Empty `__init__.py` files say nothing and are left out.
    """
    found: set[str] = set()
    waiting = [script]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name in found | stop_at:
            continue
        found.add(name)
        waiting += [file for module in _imported(path) if (file := _file_of(module))]
    return found


def _imported(path: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere but under `if TYPE_CHECKING`."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return names


def _file_of(module: str) -> Path | None:
    file = PACKAGE.parent / Path(*module.split(".")).with_suffix(".py")
    return file if module.startswith(f"{PACKAGE.name}.") and file.is_file() else None
