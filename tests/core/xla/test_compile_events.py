"""What JAX compiles is recorded with the shapes that caused it, while the log is open and no longer."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from factories import ROOT

from gradtrail.core.xla.compile_events import CompileLog, cache_hits, differences
from gradtrail.core.xla.compiler import Compiler


def test_a_function_called_with_two_shapes_is_a_retrace() -> None:
    @jax.jit
    def planted(values: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * values.sum()

    with CompileLog() as log:
        for length in (3, 4, 3):
            planted(jnp.ones(length), jnp.ones(()))
    assert log.signatures["planted"] == ["float32[3], float32[]", "float32[4], float32[]"]
    assert differences(log.retraced()["planted"]) == "argument 1: float32[3], float32[4]"


def test_differences_are_in_dtype_or_in_the_number_of_arguments() -> None:
    assert differences(["float32[2,3], int32[]", "float32[2,3], float32[]"]) == "argument 2: int32[], float32[]"
    assert differences(["float32[2]", "float32[2], int32[]"]) == "float32[2], then float32[2], int32[]"


@pytest.mark.parametrize("without_jit", [False, True])
def test_operations_of_jax_itself_may_meet_any_shape(without_jit: bool) -> None:
    @jax.jit
    def planted(values: jax.Array, key: jax.Array) -> jax.Array:
        return values.at[0].add(values[1]) * jax.random.normal(key, values.shape)

    with CompileLog() as log, jax.disable_jit(without_jit):
        for length in (13, 14):
            jnp.cumsum(jnp.ones(length))
            if without_jit:
                planted(jnp.ones(length), jax.random.key(0))
    assert log.compilations >= 2
    assert log.retraced() == {}


def test_what_is_compiled_ahead_of_time_is_counted_and_no_retrace() -> None:
    def double(values: jax.Array) -> jax.Array:
        return 2 * values

    with CompileLog() as log:
        compiler = Compiler(lambda: 0.0, log=log)
        for length in (5, 6):
            compiler.compile("double", double, jax.ShapeDtypeStruct((length,), jnp.float32))
    assert log.compilations == compiler.compilations["double"] == 2
    assert log.seconds > 0
    assert log.retraced() == {}


def test_an_error_in_the_block_closes_the_log_and_leaves_the_logger_as_it_was() -> None:
    logger = logging.getLogger("jax._src.interpreters.pxla")
    before = logger.level, logger.propagate, list(logger.handlers)
    with pytest.raises(ZeroDivisionError), CompileLog() as log:
        _ = 1 / 0
    assert (logger.level, logger.propagate, list(logger.handlers)) == before

    @jax.jit
    def later(values: jax.Array) -> jax.Array:
        return values + 1

    later(jnp.ones(7))
    assert (log.compilations, log.seconds, dict(log.signatures)) == (0, 0.0, {})


CACHED = """
import sys
import jax, jax.numpy as jnp
from gradtrail.core.xla.compiler import Compiler
from gradtrail.core.xla.compile_events import CompileLog
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
with CompileLog() as log:
    made = Compiler(lambda: 0.0).compile("f", lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((8, 8), jnp.float32))
print(made.times.cached, log.requests, log.hits, log.misses)
"""


def test_a_cache_hit_is_not_a_miss(tmp_path: Path) -> None:
    """Another process has compiled the program before."""
    command = [sys.executable, "-c", CACHED, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    outputs = [subprocess.run(command, env=environment, check=True, stdout=-1, text=True).stdout for _ in range(2)]
    assert outputs == ["False 1 0 1\n", "True 1 1 0\n"]


def test_cache_hits_are_those_of_this_thread() -> None:
    event = "/jax/compilation_cache/cache_hits"
    with cache_hits() as hits:
        thread = threading.Thread(target=jax.monitoring.record_event, args=(event,))
        thread.start()
        thread.join()
        assert hits == []
        jax.monitoring.record_event(event)
    jax.monitoring.record_event(event)
    assert hits == [event]


def test_only_the_thread_that_compiles_ahead_of_time_is_excused() -> None:
    @jax.jit
    def beside(values: jax.Array) -> jax.Array:
        return values * 3

    asking, done = threading.Event(), threading.Event()

    with CompileLog() as log:

        def ask() -> None:
            with log.ahead_of_time():
                asking.set()
                done.wait()

        thread = threading.Thread(target=ask)
        thread.start()
        asking.wait()
        for length in (3, 4):
            beside(jnp.ones(length))
        done.set()
        thread.join()
    assert list(log.retraced()) == ["beside"]
