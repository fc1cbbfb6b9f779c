"""Costs of a compiled program by XLA's own analysis, and the donated arguments that it does not reuse."""

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from gradtrail.core.xla.loop_costs import count_bounded_loops, count_equations, repeated_costs

_ALIAS = re.compile(r"\((\d+), \{[^}]*\}, (?:may|must)-alias\)")  # in a program's header: parameter of a result


@dataclass(frozen=True, kw_only=True)
class StaticCost:
    """Cost of one call by the compiler's cost and memory analysis.

    The body of a loop of known length counts once per iteration. If the length depends on data, it counts with the
    largest length that the loop's condition states, and FLOPs, transcendentals and bytes are upper bounds; without such
    a bound, as in the loop over training steps, it counts once.
    """

    flops: int  # floating-point operations
    transcendentals: int  # exponentials, logarithms and the like
    bytes_accessed: int  # bytes read and written
    argument_bytes: int  # size of the arguments
    output_bytes: int  # size of the results
    alias_bytes: int  # part of the results that reuses the memory of donated arguments
    temporary_bytes: int  # memory for intermediate values
    total_bytes: int  # arguments + outputs + temporaries - aliases
    jaxpr_equations: int  # equations of the traced program, inner programs included
    stablehlo_bytes: int  # length of the StableHLO text
    hlo_instructions: int  # instructions in the optimized HLO
    hlo_fusions: int  # fusions among them
    donated_buffers: int  # arguments whose memory the results reuse
    float64_instructions: int  # instructions of the optimized program with a float64 result
    data_dependent_loops: int  # loops that are counted with their largest length
    touched_bytes: int  # bytes read and written, without rows of an argument that the program does not gather

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per touched byte; NaN without any."""
        return self.flops / self.touched_bytes if self.touched_bytes else float("nan")


NO_COST = StaticCost(**{field.name: 0 for field in dataclasses.fields(StaticCost)})


def static_cost(traced: Any, lowered: Any, compiled: Any, stablehlo_bytes: int, unread_bytes: int = 0) -> StaticCost:
    """Return the static cost of a program.

    Args:
        traced: the program as a jaxpr.
        lowered: the program before optimization.
        stablehlo_bytes: length of its StableHLO text.
        unread_bytes: size of arguments that are not read, see `Compiler.compile`.
    """
    cost: dict[str, float] = compiled.cost_analysis() or {}
    repeated = repeated_costs(traced.jaxpr)
    before = (lowered.cost_analysis() or {}).get("bytes accessed", 0.0) if repeated.bytes_accessed else 0.0

    def with_loops(optimized: float) -> int:
        """Add the bytes of repeated iterations, scaled as optimization scaled the program's."""
        return int(optimized + (optimized / before if before else 1.0) * repeated.bytes_accessed)

    once = cost.get("bytes accessed", 0.0)
    memory: Any = compiled.memory_analysis()
    header, _, body = (compiled.as_text() or "").partition("\n")
    lines = [line for line in body.splitlines() if " = " in line]
    return StaticCost(
        flops=int(cost.get("flops", 0) + repeated.flops),
        transcendentals=int(cost.get("transcendentals", 0) + repeated.transcendentals),
        bytes_accessed=with_loops(once),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        total_bytes=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        jaxpr_equations=count_equations(traced.jaxpr),
        stablehlo_bytes=stablehlo_bytes,
        hlo_instructions=len(lines),
        hlo_fusions=sum(" fusion(" in line for line in lines),
        donated_buffers=len(_ALIAS.findall(header)),
        float64_instructions=sum(re.search(r" = \(?[^()]*\bf64\[", line) is not None for line in lines),
        data_dependent_loops=count_bounded_loops(traced.jaxpr),
        touched_bytes=with_loops(max(0.0, once - unread_bytes)),
    )


def lost_donations(compiled: Any, args: Sequence[Any], argnums: Collection[int]) -> tuple[str, ...]:
    """Return the leaves of these arguments whose memory no result reuses; every leaf is a parameter of the program."""
    if not argnums:
        return ()
    header = (compiled.as_text() or "").partition("\n")[0]
    reused = set(map(int, _ALIAS.findall(header)))
    leaves = [(number, leaf) for number, arg in enumerate(args) for leaf in jax.tree.leaves(arg)]
    return tuple(
        shape(leaf) for place, (number, leaf) in enumerate(leaves) if number in argnums and place not in reused
    )


def shape(leaf: Any) -> str:
    """Return shape and dtype of an array, concrete or abstract, such as `float32[8,8]`."""
    return jax.core.ShapedArray(leaf.shape, leaf.dtype).str_short()
