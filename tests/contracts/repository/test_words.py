"""Docstrings and names are plain: the part of docs/CONTRIBUTING.md, "Words", that a program can check."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from projects import ROOT

MODULES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "pipeline").rglob("*.py")])
_ENTRY = re.compile(r"^\s{2,}([`*\w.]+)(?: \([^)]*\))?: (\S+)", re.MULTILINE)
# First words of an entry that is no noun phrase: "of the member", "that trains".
_FRAGMENTS = {
    *("of", "that", "in", "by", "to", "from", "with", "for", "as", "likewise", "on", "see", "at", "whose", "which"),
    *("where", "its", "beside", "because"),
}
# Names that do not say what the value is.
_EMPTY_NAMES = {
    *("found", "said", "told", "each", "own", "others", "given", "known", "beside", "mine", "wanted", "taken", "asked"),
    *("what", "begun", "kept", "here", "shown", "named", "seen", "of", "at"),
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_entries_begin_with_a_noun_and_names_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [*fragments_in(tree)] == []
    assert [*empty_names_in(tree)] == []


def fragments_in(tree: ast.AST) -> Iterator[str]:
    """Yield the entries under Args, Attributes and the like that begin as a fragment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for entry in _ENTRY.finditer(ast.get_docstring(node) or ""):
                if entry.group(2).lower().strip(",;.") in _FRAGMENTS:
                    yield f"{getattr(node, 'name', 'module')}: {entry.group(0).strip()}"


def empty_names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the variables and arguments with names of the list."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in _EMPTY_NAMES:
                yield f"line {node.lineno}: {name}"


def test_fragments_and_empty_names_are_noticed() -> None:
    tree = ast.parse(
        'def f(found):\n    """Do it.\n\n    Args:\n        found: of the member.\n        size: size of it.\n    """\n'
    )
    assert [*fragments_in(tree)] == ["f: found: of"]
    assert [*empty_names_in(tree)] == ["line 1: found"]
