"""Costs of loops that XLA's cost analysis leaves out: it counts the body of a loop once, whatever its length."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core


@dataclass(frozen=True, kw_only=True)
class LoopCost:
    """Cost of loop iterations after the first."""

    flops: float = 0.0  # floating-point operations
    transcendentals: float = 0.0  # exponentials, logarithms and the like
    bytes_accessed: float = 0.0  # bytes read and written

    def __add__(self, other: "LoopCost") -> "LoopCost":
        return LoopCost(
            flops=self.flops + other.flops,
            transcendentals=self.transcendentals + other.transcendentals,
            bytes_accessed=self.bytes_accessed + other.bytes_accessed,
        )

    def times(self, factor: float) -> "LoopCost":
        """Return the cost multiplied by `factor`."""
        return LoopCost(
            flops=factor * self.flops,
            transcendentals=factor * self.transcendentals,
            bytes_accessed=factor * self.bytes_accessed,
        )


def repeated_costs(jaxpr: Any) -> LoopCost:
    """Return the cost, before optimization, of all iterations after the first of the loops in a program that runs once.

    A `scan` counts with its length, a `while` with the bound that its condition states, see `largest_length`.
    """
    total = LoopCost()
    for equation in _open(jaxpr).eqns:
        within = sum(map(repeated_costs, _inner_programs(equation)), LoopCost())
        is_scan = equation.primitive.name == "scan"
        length = equation.params["length"] if is_scan else largest_length(equation)
        if length is None:
            total += within
        else:
            body = equation.params["jaxpr" if is_scan else "body_jaxpr"]
            total += within.times(length) + _iteration_cost(body).times(length - 1)
    return total


def largest_length(equation: Any) -> int | None:
    """Return the largest number of iterations of a `while`; None for another equation, or one without such a bound.

    A loop whose length depends on data states the bound as `counter < constant` in its condition, next to the test of
    the data; the counter starts at 0.
    """
    if equation.primitive.name != "while":
        return None
    tests = [test for test in _open(equation.params["cond_jaxpr"]).eqns if test.primitive.name == "lt"]
    limits = [test.invars[1].val for test in tests if isinstance(test.invars[1], jax_core.Literal)]
    return min((int(limit) for limit in limits if jnp.issubdtype(jnp.result_type(limit), jnp.integer)), default=None)


def count_bounded_loops(jaxpr: Any) -> int:
    """Return the number of loops of a jaxpr, and of all jaxprs inside it, that count with their largest length."""
    return sum(
        (largest_length(equation) is not None) + sum(map(count_bounded_loops, _inner_programs(equation)))
        for equation in _open(jaxpr).eqns
    )


def count_equations(jaxpr: Any) -> int:
    """Return the number of equations of a jaxpr and of all jaxprs inside it."""
    return sum(1 + sum(map(count_equations, _inner_programs(equation))) for equation in _open(jaxpr).eqns)


def _iteration_cost(body: Any) -> LoopCost:
    """Return the cost of a loop's body, with one iteration of each inner loop."""
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in body.in_avals]
    cost = jax.jit(jax_core.jaxpr_as_fun(body)).lower(*arguments).cost_analysis() or {}
    return LoopCost(
        flops=cost.get("flops", 0.0),
        transcendentals=cost.get("transcendentals", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
    )


def _inner_programs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield part


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)
