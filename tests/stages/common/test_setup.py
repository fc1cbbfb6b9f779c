"""What one process compiled another takes from the cache, and two at once compile nothing twice."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import time, os
import jax, jax.numpy as jnp
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common.setup import only_compiler, set_up_cache
def slow(values):
    for _ in range(60):
        values = jnp.sin(values) @ values
    return values
compiler = Compiler(time.perf_counter, only_compiler(set_up_cache()))
made = compiler.compile("slow", slow, jax.ShapeDtypeStruct((16, 16), jnp.float32))
print(made.times.cached, float(made(jnp.eye(16)).sum()))
"""


def run(folder: Path, count: int) -> list[str]:
    (folder / "dvc.yaml").touch()
    both = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=folder, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    return sorted(process.communicate(timeout=120)[0] for process in both)


def test_two_at_once_compile_a_function_once_and_the_next_not_at_all(tmp_path: Path) -> None:
    first = run(tmp_path, 2)
    assert [told.split()[0] for told in first] == ["False", "True"]
    (third,) = run(tmp_path, 1)
    assert third.split()[0] == "True"
    assert len({told.split()[1] for told in (*first, third)}) == 1
