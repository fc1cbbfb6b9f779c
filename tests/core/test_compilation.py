"""Costs are those of the mathematics, times those of the clock, and a compiled function has one shape."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import new_compiler

from gradtrail.core.compilation import (
    NO_COST,
    NO_TIMES,
    WATCHED,
    CompiledFunction,
    CompileTimes,
    cost_metrics,
    time_metrics,
)
from gradtrail.core.data_parallel import make_mesh, replicated

NOT_A_NUMBER = jnp.array([-1.0])  # its logarithm


def matmul(
    rows: int = 64, depth: int = 128, columns: int = 32, clock: Callable[[], float] | None = None
) -> CompiledFunction:
    left, right = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, depth), (depth, columns)))
    return new_compiler(clock).compile("matmul", jnp.dot, left, right)


def test_flops_and_bytes_of_a_matrix_product() -> None:
    cost = matmul().cost
    assert cost.flops == pytest.approx(2 * 64 * 128 * 32, rel=0.01)
    assert cost.argument_bytes == 4 * (64 * 128 + 128 * 32)
    assert cost.output_bytes == 4 * 64 * 32
    assert cost.bytes_accessed >= cost.argument_bytes + cost.output_bytes
    assert cost.total_bytes == cost.argument_bytes + cost.output_bytes + cost.temporary_bytes - cost.alias_bytes
    assert cost.hlo_instructions >= 3


def test_transcendentals_are_counted() -> None:
    function = new_compiler().compile("exp", jnp.exp, jax.ShapeDtypeStruct((100,), jnp.float32))
    assert function.cost.transcendentals == 100


def test_the_cost_is_the_same_twice() -> None:
    assert matmul().cost == matmul().cost


def test_the_result_is_that_of_the_function() -> None:
    left, right = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 1), np.float32)
    np.testing.assert_array_equal(matmul(2, 3, 1)(left, right), left @ right)


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


def test_times_are_those_of_the_clock_that_was_handed_in() -> None:
    ticks = itertools.accumulate([10.0, 1.0, 2.0, 100.0, 4.0])  # the guard's time is not the compiler's
    function = matmul(clock=lambda: next(ticks))
    assert function.times == CompileTimes(trace_seconds=1, lower_seconds=2, compile_seconds=4)
    assert time_metrics([function]) == {
        "compile/matmul/trace_seconds": 1,
        "compile/matmul/lower_seconds": 2,
        "compile/matmul/compile_seconds": 4,
        "compile/matmul/cached": 0,
        "compile/total_seconds": 7,
    }


def test_metrics_are_named_by_function_and_figure() -> None:
    function = matmul()
    metrics = cost_metrics([function])
    assert set(metrics) == {f"compile/matmul/{figure}" for figure in WATCHED}
    assert metrics["compile/matmul/flops"] == function.cost.flops
    assert all(type(value) is int for value in metrics.values())


def logarithm(values: jax.Array) -> jax.Array:
    return jnp.log(values)


@pytest.mark.parametrize("debugging", [jax.disable_jit, jax.debug_nans])
def test_for_debugging_nothing_is_compiled_ahead_and_nothing_costs(debugging: Callable[[bool], Any]) -> None:
    def never() -> float:
        raise AssertionError("a clock was read though nothing was compiled")

    with debugging(True):
        function = new_compiler(never).compile("log", logarithm, NOT_A_NUMBER, out_shardings=replicated(make_mesh()))
        np.testing.assert_array_equal(function(jnp.ones((2, 2))), np.zeros((2, 2)), "any shape does")
    assert (function.name, function.cost, function.times) == ("log", NO_COST, NO_TIMES)
    assert not any(cost_metrics([function]).values())
    assert not any(time_metrics([function]).values())


def test_to_step_through_the_function_gets_the_values_themselves() -> None:
    given = []

    def keep(values: jax.Array) -> jax.Array:
        given.append(values)
        return values

    with jax.disable_jit():
        new_compiler().compile("keep", keep, NOT_A_NUMBER)(NOT_A_NUMBER)
    assert [float(values[0]) for values in given] == [-1]


def test_a_nan_stops_the_call_only_where_that_is_asked_for() -> None:
    assert np.isnan(new_compiler().compile("log", logarithm, NOT_A_NUMBER)(NOT_A_NUMBER))
    with jax.debug_nans(True):
        watched = new_compiler().compile("log", logarithm, NOT_A_NUMBER)
        assert watched(jnp.ones(1)) == 0
        with pytest.raises(FloatingPointError, match="nan"):
            watched(NOT_A_NUMBER)


def test_results_lie_where_they_are_asked_to() -> None:
    everywhere, argument = replicated(make_mesh()), jnp.ones(4)
    asked, free = (
        new_compiler().compile("log", logarithm, argument, out_shardings=sharding)(argument).sharding
        for sharding in (everywhere, None)
    )
    assert asked == everywhere
    assert free == argument.sharding != everywhere
