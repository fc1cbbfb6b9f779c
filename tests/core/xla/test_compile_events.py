"""What JAX compiles is told, with the shapes that caused it; a hit of the cache is no compilation by itself."""

import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from factories import new_compiler

from gradtrail.core.xla.compile_events import asked_for, compile_log, differences


def test_a_function_that_meets_two_shapes_is_told_with_both() -> None:
    @jax.jit
    def planted(values: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * values.sum()

    with compile_log() as log:
        for length in (3, 4, 3):
            planted(jnp.ones(length), jnp.ones(()))
    assert log.signatures["planted"] == ["float32[3], float32[]", "float32[4], float32[]"]
    assert differences(log.retraced()["planted"]) == "argument 1: float32[3], float32[4]"


def test_a_change_of_dtype_and_one_of_the_number_of_arguments_are_told() -> None:
    assert differences(["float32[2,3], int32[]", "float32[2,3], float32[]"]) == "argument 2: int32[], float32[]"
    assert differences(["float32[2]", "float32[2], int32[]"]) == "float32[2], then float32[2], int32[]"


def test_operations_of_jax_itself_may_meet_any_shape() -> None:
    with compile_log() as log:
        for length in (13, 14):
            jnp.cumsum(jnp.ones(length))
    assert log.compilations >= 2
    assert log.retraced() == {}


def test_what_is_compiled_ahead_of_time_is_counted_and_no_retrace() -> None:
    def double(values: jax.Array) -> jax.Array:
        return 2 * values

    compiler = new_compiler()
    with compile_log() as log:
        for length in (5, 6):
            compiler.compile("double", double, jax.ShapeDtypeStruct((length,), jnp.float32))
    assert log.asked_for == compiler.compilations["double"] == 2, "compiled twice counts two"
    assert log.retraced() == {}


def test_a_log_takes_nothing_before_and_after_it() -> None:
    with compile_log() as log:
        pass

    @jax.jit
    def later(values: jax.Array) -> jax.Array:
        return values + 1

    later(jnp.ones(7))
    assert log.compilations == 0


CACHED = """
import sys
import threading
import jax, jax.numpy as jnp
from gradtrail.core.xla.compiler import Compiler
from gradtrail.core.xla.compile_events import compile_log
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
with compile_log() as log:
    made = Compiler(lambda: 0.0).compile("f", lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((8, 8), jnp.float32))
print(made.times.cached, log.requests, log.hits, log.misses)
"""


@pytest.mark.parametrize("cache", [True, False])
def test_a_hit_is_told_from_a_compilation(cache: bool, tmp_path: Path) -> None:
    folder = str(tmp_path) if cache else ""
    told = [
        subprocess.run([sys.executable, "-c", CACHED, folder], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert told == (["False 1 0 1\n", "True 1 1 0\n"] if cache else ["False 1 0 0\n"] * 2)


def test_threads_that_compile_side_by_side_do_not_excuse_each_other() -> None:
    @jax.jit
    def beside(values: jax.Array) -> jax.Array:
        return values * 3

    asking, done = threading.Event(), threading.Event()

    def ask() -> None:
        with asked_for():
            asking.set()
            done.wait()

    with compile_log() as log:
        thread = threading.Thread(target=ask)
        thread.start()
        asking.wait()
        for length in (3, 4):
            beside(jnp.ones(length))
        done.set()
        thread.join()
    assert list(log.retraced()) == ["beside"]
