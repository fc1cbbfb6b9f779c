"""What a compiled program costs by XLA's own analysis, and which donated arguments it makes no use of."""

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from gradtrail.core.xla.loop_costs import count_equations, repeated_costs

_ALIAS = re.compile(r"\((\d+), \{[^}]*\}, (?:may|must)-alias\)")  # in a program's header: parameter of a result


@dataclass(frozen=True, kw_only=True)
class StaticCost:
    """What one call costs, by the compiler's cost and memory analysis.

    The body of a loop of known length counts once per iteration; that of a loop whose bounds are arguments counts once.

    Attributes:
        flops: floating-point operations.
        transcendentals: exponentials, logarithms and the like.
        bytes_accessed: bytes read and written.
        argument_bytes: size of the arguments.
        output_bytes: size of the results.
        alias_bytes: part of the results that reuses the memory of donated arguments.
        temporary_bytes: memory for intermediate values.
        total_bytes: arguments + outputs + temporaries - aliases.
        jaxpr_equations: equations of the traced program, inner programs included.
        stablehlo_bytes: length of the StableHLO text.
        hlo_instructions: instructions in the optimized HLO.
        hlo_fusions: fusions among them.
        donated_buffers: arguments whose memory the results reuse.
        float64_instructions: instructions of the optimized program with a float64 result.
    """

    flops: int
    transcendentals: int
    bytes_accessed: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    total_bytes: int
    jaxpr_equations: int
    stablehlo_bytes: int
    hlo_instructions: int
    hlo_fusions: int
    donated_buffers: int
    float64_instructions: int

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte accessed; NaN where no byte is."""
        return self.flops / self.bytes_accessed if self.bytes_accessed else float("nan")


NO_COST = StaticCost(**{each.name: 0 for each in dataclasses.fields(StaticCost)})


def static_cost(traced: Any, lowered: Any, compiled: Any, stablehlo_bytes: int) -> StaticCost:
    """Return the static cost of a program from its three stages and the length of its StableHLO text."""
    cost: dict[str, float] = compiled.cost_analysis() or {}
    repeated = repeated_costs(traced.jaxpr, cost, lowered)
    memory: Any = compiled.memory_analysis()
    header, _, body = (compiled.as_text() or "").partition("\n")
    lines = [line for line in body.splitlines() if " = " in line]
    return StaticCost(
        flops=int(cost.get("flops", 0) + repeated.flops),
        transcendentals=int(cost.get("transcendentals", 0) + repeated.transcendentals),
        bytes_accessed=int(cost.get("bytes accessed", 0) + repeated.bytes_accessed),
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
    )


def lost_donations(compiled: Any, args: Sequence[Any], argnums: Collection[int]) -> tuple[str, ...]:
    """Return the leaves of some arguments whose memory no result reuses; the program has every leaf as a parameter."""
    if not argnums:
        return ()
    header = (compiled.as_text() or "").partition("\n")[0]
    reused = set(map(int, _ALIAS.findall(header)))
    leaves = [(number, leaf) for number, arg in enumerate(args) for leaf in jax.tree.leaves(arg)]
    return tuple(
        shape(leaf) for place, (number, leaf) in enumerate(leaves) if number in argnums and place not in reused
    )


def shape(leaf: Any) -> str:
    """Return shape and dtype of an array or what stands for one, such as `float32[8,8]`."""
    return jax.core.ShapedArray(leaf.shape, leaf.dtype).str_short()
