"""Costs of loops that XLA's cost analysis leaves out: it counts the body of a loop once, whatever its length."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jax_core


@dataclass(frozen=True, kw_only=True)
class LoopCost:
    """Cost of loop iterations after the first.

    Attributes:
        flops: floating-point operations.
        transcendentals: exponentials, logarithms and the like.
        bytes_accessed: bytes read and written.
    """

    flops: float = 0.0
    transcendentals: float = 0.0
    bytes_accessed: float = 0.0

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


def repeated_costs(jaxpr: Any, optimized: dict[str, float], lowered: Any) -> LoopCost:
    """Return the cost of all iterations of all `scan`s after their first ones.

    The cost of a body is that before optimization; its bytes are scaled by the ratio of the whole program's bytes after
    optimization to those before it.

    Args:
        jaxpr: the traced program, closed.
        optimized: `cost_analysis()` of the compiled program.
        lowered: the program before compilation.
    """
    found = _extra(jaxpr)
    if not found.bytes_accessed:
        return found
    before = (lowered.cost_analysis() or {}).get("bytes accessed", 0.0)
    scale = optimized.get("bytes accessed", 0.0) / before if before else 1.0
    return dataclasses.replace(found, bytes_accessed=scale * found.bytes_accessed)


def count_equations(jaxpr: Any) -> int:
    """Return the number of equations of a jaxpr and of all jaxprs inside it."""
    return sum(1 + sum(map(count_equations, _inner_programs(equation))) for equation in _open(jaxpr).eqns)


def _extra(jaxpr: Any) -> LoopCost:
    """Return the cost of all iterations after the first of the loops in a program that runs once."""
    total = LoopCost()
    for equation in _open(jaxpr).eqns:
        within = sum(map(_extra, _inner_programs(equation)), LoopCost())
        if equation.primitive.name == "scan":
            length = equation.params["length"]
            total += within.times(length) + _once(equation.params["jaxpr"]).times(length - 1)
        else:
            total += within
    return total


def _once(body: Any) -> LoopCost:
    """Return the cost of a loop's body, each inner loop counted for one iteration."""
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
