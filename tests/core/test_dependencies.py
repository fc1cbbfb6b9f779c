"""`core` runs where nothing but jax, flax, optax, numpy and jaxtyping is installed."""

import ast
import sys

from factories import ROOT

ALLOWED = {"jax", "flax", "optax", "numpy", "jaxtyping"}


def test_core_imports_itself_the_standard_library_and_five_packages() -> None:
    result: dict[str, str] = {}
    for path in (ROOT / "src/gradtrail/core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module}"]
            result |= {name: path.name for name in names if not name.startswith("gradtrail.core.")}
    other_values = {name for name in result if name.partition(".")[0] not in ALLOWED | sys.stdlib_module_names}
    assert {name: result[name] for name in other_values} == {}
    assert {name.partition(".")[0] for name in result} >= ALLOWED
