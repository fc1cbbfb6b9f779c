"""What JAX compiles is recorded with the shapes that caused it, while the log is open and no longer."""

import logging
import operator
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import ROOT

from gradtrail.core.xla.compile_events import CompileLog
from gradtrail.core.xla.compiler import Compiler

HERE = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)


def call(function: Callable[..., object], *values: Any) -> int:
    """Call a function and return the number of the line that does so."""
    function(*values)
    return call.__code__.co_firstlineno + 2


def test_every_compilation_of_a_call_is_counted_with_its_name_shapes_and_line() -> None:
    """Whatever the name: of the project's own, of JAX's, and of a function that is made anew each time."""

    def _scaled(values: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * values.sum()

    jitted = jax.jit(_scaled)
    with CompileLog() as log:
        for length in (3, 4, 3):
            line = call(jitted, np.ones(length, np.float32), np.float32(1))
        for _ in range(2):
            call(jax.jit(lambda values: values * 2), np.ones(3, np.float32))
        call(operator.add, jax.device_put(np.ones(5, np.float32)), 1)  # outside of any jitted function
        call(jax.jit(lambda: 1.0))
    assert {item.line for item in log.unplanned} == {f"{HERE}:{line}"}
    assert [(item.function, item.signature) for item in log.unplanned] == [
        ("_scaled", "float32[3], float32[]"),
        ("_scaled", "float32[4], float32[]"),
        ("<lambda>", "float32[3]"),
        ("<lambda>", "float32[3]"),
        ("add", "float32[5], int32[], weak_type=True"),
        ("<lambda>", "no arguments"),
    ]


@pytest.mark.parametrize("switch", ["jax_disable_jit", "jax_debug_nans"])
def test_under_a_debug_switch_every_call_compiles_and_none_is_unplanned(switch: str) -> None:
    jax.config.update(switch, True)
    try:
        with CompileLog() as log:
            jnp.cumsum(jax.device_put(np.ones(13, np.float32)))
    finally:
        jax.config.update(switch, False)
    assert log.compilations >= 1
    assert log.unplanned == []


def test_ahead_of_time_compilations_are_planned() -> None:
    def double(values: jax.Array) -> jax.Array:
        return 2 * values

    with CompileLog() as log:
        compiler = Compiler(lambda: 0.0, log=log)
        for length in (5, 6):
            compiler.compile("double", double, jax.ShapeDtypeStruct((length,), jnp.float32))
        with compiler.planned():
            jax.jit(double)(np.ones(7, np.float32))
    assert log.compilations == compiler.compilations["double"] + 1 == 3
    assert log.seconds > 0
    assert log.unplanned == []


def test_error_in_the_block_closes_the_log() -> None:
    logger = logging.getLogger("jax._src.interpreters.pxla")
    before = logger.level, logger.propagate, list(logger.handlers)
    with pytest.raises(ZeroDivisionError), CompileLog() as log:
        _ = 1 / 0
    assert (logger.level, logger.propagate, list(logger.handlers)) == before

    @jax.jit
    def later(values: jax.Array) -> jax.Array:
        return values + 1

    later(jnp.ones(7))
    assert (log.compilations, log.seconds, log.unplanned) == (0, 0.0, [])


CACHED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from gradtrail.core.xla.compiler import Compiler
from gradtrail.core.xla.compile_events import CompileLog
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
with CompileLog() as log:
    square = np.ones((8, 8), np.float32)
    made = Compiler(lambda: 0.0, log=log).compile("f", lambda x: jnp.sin(x) @ x, square)
    jax.jit(lambda x: jnp.cos(x) @ x)(square)
print(made.times.cached, log.requests, log.hits, log.misses, len(log.unplanned))
"""


def test_a_cache_hit_is_not_a_miss_and_counts_as_a_compilation(tmp_path: Path) -> None:
    """Another process has compiled the programs before."""
    command = [sys.executable, "-c", CACHED, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    outputs = [subprocess.run(command, env=environment, check=True, stdout=-1, text=True).stdout for _ in range(2)]
    assert outputs == ["False 2 0 2 1\n", "True 2 2 0 1\n"]


def test_planned_applies_to_its_thread_only() -> None:
    @jax.jit
    def beside(values: jax.Array) -> jax.Array:
        return values * 3

    asking, done = threading.Event(), threading.Event()

    with CompileLog() as log:

        def ask() -> None:
            with log.planned():
                asking.set()
                done.wait()

        thread = threading.Thread(target=ask)
        thread.start()
        asking.wait()
        for length in (3, 4):
            beside(np.ones(length, np.float32))
        done.set()
        thread.join()
    assert [item.function for item in log.unplanned] == ["beside", "beside"]
