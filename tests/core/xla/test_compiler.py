"""Costs are those of the mathematics, times those of the clock, and each compilation is recorded."""

import dataclasses
import functools
import itertools
import operator
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import new_compiler, train_config

from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model
from gradtrail.core.sharding import make_mesh, replicated
from gradtrail.core.train.loop import TrainingFunctions
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.xla.compile_log import CompileLog
from gradtrail.core.xla.compiler import (
    NO_COST,
    NO_TIMES,
    TIMED_CALLS,
    CallTimes,
    CompiledFunction,
    Compiler,
    CompileTimes,
)

NOT_A_NUMBER = jnp.array([-1.0])  # its logarithm


def matmul(
    rows: int = 64, depth: int = 128, columns: int = 32, clock: Callable[[], float] | None = None
) -> CompiledFunction:
    left, right = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, depth), (depth, columns)))
    return new_compiler(clock).compile("matmul", jnp.dot, left, right)


def test_costs_of_a_matrix_product_are_those_of_its_shapes_and_texts() -> None:
    function = matmul()
    texts, cost = function.texts(), function.cost
    assert cost.flops == pytest.approx(2 * 64 * 128 * 32, rel=0.01)
    assert cost.argument_bytes == 4 * (64 * 128 + 128 * 32)
    assert cost.output_bytes == 4 * 64 * 32
    assert cost.bytes_accessed >= cost.argument_bytes + cost.output_bytes
    assert cost.total_bytes == cost.argument_bytes + cost.output_bytes + cost.temporary_bytes - cost.alias_bytes
    assert cost.hlo_instructions >= 3
    assert set(texts) == {"jaxpr", "stablehlo", "hlo"}
    assert cost.stablehlo_bytes == len(texts["stablehlo"])
    assert cost.jaxpr_equations == texts["jaxpr"].count("dot_general") == 1
    assert cost.float64_instructions == 0
    assert function.signature == "float32[64,128], float32[128,32]"


@pytest.mark.parametrize("wrong", [jnp.zeros((3, 3)), jnp.zeros((2, 3), jnp.int32)])
def test_another_shape_or_dtype_is_an_error_and_no_compilation(wrong: jax.Array) -> None:
    with pytest.raises(TypeError, match="compiled"):
        matmul(2, 3, 1)(wrong, jnp.zeros((3, 1)))


def test_donated_memory_is_reused_and_the_argument_gone() -> None:
    def double(values: jax.Array) -> jax.Array:
        return values * 2

    argument = jnp.ones(1000)
    donating, plain = (
        new_compiler().compile("double", double, argument, donate_argnums=donated) for donated in ((0,), ())
    )
    assert (donating.cost.alias_bytes, plain.cost.alias_bytes) == (4000, 0)
    assert donating.cost.total_bytes == plain.cost.total_bytes - 4000
    plain(argument)
    assert not argument.is_deleted()
    donating(argument)
    assert argument.is_deleted()


def test_times_come_from_the_clock() -> None:
    ticks = itertools.accumulate([10.0, 1.0, 2.0, 100.0, 4.0])  # the guard's time is not the compiler's
    function = matmul(clock=lambda: next(ticks))
    assert function.times == CompileTimes(trace_seconds=1, lower_seconds=2, compile_seconds=4)


def logarithm(values: jax.Array) -> jax.Array:
    return jnp.log(values)


def test_disable_jit_compiles_nothing_ahead_of_time() -> None:
    def never() -> float:
        raise AssertionError("a clock was read though nothing was compiled")

    with jax.disable_jit():
        function = new_compiler(never).compile(
            "log", logarithm, NOT_A_NUMBER, out_shardings=replicated(make_mesh(jax.local_devices()))
        )
        np.testing.assert_array_equal(function(jnp.ones((2, 2))), np.zeros((2, 2)), "any shape does")
    assert (function.name, function.cost, function.times) == ("log", NO_COST, NO_TIMES)


def scanned(length: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def function(values: jax.Array, matrix: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ matrix), None), values, length=length)[0]

    return function


@pytest.mark.parametrize("length", [1, 2, 50])
def test_a_loop_costs_as_often_as_it_is_passed_and_a_loop_in_it_as_both(length: int) -> None:
    def nested(values: jax.Array, matrix: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (scanned(length)(carry, matrix), None), values, length=7)[0]

    shapes = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 2
    for function, count in ((scanned(length), length), (jax.jit(nested), 7 * length)):
        cost = new_compiler().compile("loop", function, *shapes).cost
        assert cost.flops == pytest.approx(count * 2 * 32**3, rel=0.02)
        assert cost.transcendentals == count * 32 * 32


def test_a_data_dependent_loop_costs_as_often_as_it_can_be_passed() -> None:
    def function(values: jax.Array, matrix: jax.Array, used: jax.Array, most: int | None) -> jax.Array:
        def has_next(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (carry[0] < used) & (carry[0] < most) if most else carry[0] < used

        return jax.lax.while_loop(has_next, lambda c: (c[0] + 1, jnp.tanh(c[1] @ matrix)), (jnp.int32(0), values))[1]

    shapes = [*[jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 2, jax.ShapeDtypeStruct((), jnp.int32)]
    for most, count in ((1, 1), (7, 7), (None, 1)):
        cost = new_compiler().compile("loop", functools.partial(function, most=most), *shapes).cost
        assert cost.transcendentals == count * 32 * 32
        assert cost.flops == pytest.approx(count * 2 * 32**3, rel=0.03)
        assert cost.data_dependent_loops == (most is not None)


@pytest.mark.parametrize("is_private", [False, True])
def test_flops_of_a_training_step_are_those_of_the_mathematics(is_private: bool) -> None:
    """Forward, the gradient of each kernel, and that of each layer's input but the first: 2 m n k each.

    Of a private step for each row of the largest batch; norms, sums and the optimizer are small.
    """
    widths = (784, 256, 128, 10)
    config = train_config(
        model=MLP(hidden=widths[1:-1], activation="relu", dropout=0.0),
        batch_size=128,
        clip_norm=None,
        privacy=dataclasses.replace(NOT_PRIVATE, enabled=is_private),
    )
    model = Model(config.model_config((28, 28), 10))
    training = TrainingFunctions(config, model, 1000, jax.local_devices(), 0.0 if is_private else None)
    cost = training.compile_run_steps(new_compiler()).cost
    rows = training.num_rows
    assert (rows > 128) == is_private
    products = [2 * rows * before * after for before, after in itertools.pairwise(widths)]
    assert cost.flops == pytest.approx(3 * sum(products) - products[0], rel=0.05)
    assert cost.data_dependent_loops == is_private


def test_calls_are_timed_from_ready_arguments_to_ready_results_and_no_more_than_needed() -> None:
    ticks = itertools.count()
    function = matmul(2, 3, 1, clock=lambda: float(next(ticks)))
    for _ in range(TIMED_CALLS + 3):
        function(np.ones((2, 3), np.float32), np.ones((3, 1), np.float32))
    assert (function.calls.first, function.calls.later) == (1.0, [1.0] * (TIMED_CALLS - 1))


def test_every_compilation_is_recorded_with_its_variant() -> None:
    compiler = new_compiler()
    variant = compiler.for_variant("float16")
    shapes = [jax.ShapeDtypeStruct((length,), jnp.float32) for length in (3, 4)]
    first, last = (compiler.compile("sine", jnp.sin, shape) for shape in shapes)
    other = variant.compile("sine", jnp.sin, shapes[0])
    assert (compiler.functions, variant.functions) == ({"sine": last}, {"sine": other})
    assert [item.name for item in compiler.compiled] == ["sine", "sine", "sine (float16)"]
    assert [item.cost for item in compiler.compiled] == [first.cost, last.cost, other.cost]
    assert compiler.compilations == {"sine": 2, "sine (float16)": 1}


def test_calls_are_timed_per_iteration_once_their_arguments_are_ready() -> None:
    now, ready = [0.0], []

    class UnderWay:
        def block_until_ready(self) -> "UnderWay":
            ready.append(now[0])
            now[0] += 100
            return self

    def call(_: UnderWay, seconds: float, __: int) -> None:
        now[0] += seconds

    calls = CallTimes(clock=lambda: now[0])
    assert np.isnan([calls.first, calls.steady]).all()
    function = CompiledFunction(
        name="f", call=call, cost=NO_COST, times=NO_TIMES, calls=calls, num_iterations=lambda *arguments: arguments[-1]
    )
    for seconds, iterations in ((9.0, 1), (4.0, 2), (6.0, 2), (50.0, 25)):
        function(UnderWay(), seconds, iterations)
    assert (calls.first, calls.steady, len(ready)) == (9.0, 2.0, 4)


HERE = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)


def call(function: Callable[..., object], *values: Any) -> int:
    """Call a function and return the number of the line that does so."""
    function(*values)
    return call.__code__.co_firstlineno + 2


def test_every_compilation_of_a_call_is_counted_with_its_name_and_line() -> None:
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
    assert [(item.function, bool(item.reason), count) for item, count in log.unplanned.items()] == [
        ("_scaled", False, 1),
        ("_scaled", True, 1),
        ("<lambda>", False, 2),  # of two lines of code
        ("<lambda>", True, 1),
        ("add", False, 1),
    ]
    assert log.unplanned.total() == 6


def test_under_disable_jit_every_call_compiles_and_none_is_unplanned() -> None:
    with jax.disable_jit(), CompileLog() as log:
        jnp.cumsum(jax.device_put(np.ones(13, np.float32)))
    assert log.compilations >= 1
    assert log.unplanned.total() == 0


def test_ahead_of_time_compilations_are_planned() -> None:
    def double(values: jax.Array) -> jax.Array:
        return 2 * values

    with CompileLog() as log:
        compiler = Compiler(lambda: 0.0, log=log)
        for length in (5, 6):
            compiler.compile("double", double, jax.ShapeDtypeStruct((length,), jnp.float32))
        with compiler.log.planned():
            jax.jit(double)(np.ones(7, np.float32))
    assert log.compilations == compiler.compilations["double"] + 1 == 3
    assert log.seconds > 0
    assert not log.unplanned
    _, reason = log.signatures.add(double, (np.ones(8, np.float32),), {}, ())
    assert reason == "argument 1 (`values`) has shape (8,), was (6,)"


def test_error_in_the_block_closes_the_log() -> None:
    with pytest.raises(ZeroDivisionError), CompileLog() as log:
        _ = 1 / 0
    jax.jit(lambda values: values + 1)(np.ones(7))
    assert (log.compilations, log.seconds, log.unplanned) == (0, 0.0, {})


def test_a_cache_hit_counts_as_a_compilation() -> None:
    """The cache of programs that the tests have does not know the constant, and then it does."""
    constant, square = np.float32(np.random.default_rng().random()), np.ones((8, 8), np.float32)
    found = []
    for _ in range(2):
        with CompileLog() as log:
            made = Compiler(lambda: 0.0, log=log).compile("f", lambda x: jnp.sin(x * constant) @ x, square)
            jax.jit(lambda x: jnp.cos(x * constant) @ x)(square)
        found.append((made.times.cached, log.requests, log.hits, log.unplanned.total()))
    assert found == [(False, 2, 0, 1), (True, 2, 2, 1)]


def test_planned_applies_to_its_thread_only() -> None:
    jitted = jax.jit(lambda values: values * 3)
    with CompileLog() as log, log.planned():
        thread = threading.Thread(target=jitted, args=(np.ones(3, np.float32),))
        thread.start()
        thread.join()
        jitted(np.ones(4, np.float32))
    assert [item.function for item in log.unplanned] == ["<lambda>"]
    assert log.compilations == 2
