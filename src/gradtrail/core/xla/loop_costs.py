"""What a program costs besides the compiler's account, which takes the body of a loop once, whatever its length."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jax_core


@dataclass(frozen=True, kw_only=True)
class LoopCost:
    """Costs of all passes of loops but the first ones."""

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
        """Return the cost of so many of these."""
        return LoopCost(
            flops=factor * self.flops,
            transcendentals=factor * self.transcendentals,
            bytes_accessed=factor * self.bytes_accessed,
        )


def repeated_costs(jaxpr: Any, optimized: dict[str, float], lowered: Any) -> LoopCost:
    """Return what the passes of all `scan`s cost but the first ones, in a program that is compiled already.

    The cost of a body is that before optimization; its bytes are scaled by what optimization spared the whole program.

    Args:
        jaxpr: the program, closed.
        optimized: the compiler's account of the whole program.
        lowered: the program as it went to the compiler.
    """
    found = _extra(jaxpr)
    if not found.bytes_accessed:
        return found
    before = (lowered.cost_analysis() or {}).get("bytes accessed", 0.0)
    spared = optimized.get("bytes accessed", 0.0) / before if before else 1.0
    return LoopCost(
        flops=found.flops, transcendentals=found.transcendentals, bytes_accessed=spared * found.bytes_accessed
    )


def count_equations(jaxpr: Any) -> int:
    """Return the number of equations of a program and of all programs inside it."""
    return sum(1 + sum(map(count_equations, _inner_programs(equation))) for equation in _open(jaxpr).eqns)


def _extra(jaxpr: Any) -> LoopCost:
    """Return what all passes but the first of the loops in a program cost, where it is run once."""
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
    """Return the cost of a body, each loop in it taken once."""
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in body.in_avals]
    cost = jax.jit(jax_core.jaxpr_as_fun(body)).lower(*arguments).cost_analysis() or {}
    return LoopCost(
        flops=cost.get("flops", 0.0),
        transcendentals=cost.get("transcendentals", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
    )


def _inner_programs(equation: Any) -> Iterator[Any]:
    """Yield the programs among the parameters of an equation."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield part


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)
